"""A run that was resumed: two optimizers of the same tensors, one of which begins where the other has ended, are one track."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from accumulation_harness.audit.compare.windows import distance, raw
from accumulation_harness.audit.evidence import Run, Step, Track

RESTORED = 1e-3  # relative; gradients found by a resumed run are those that were saved


def stitched(run: Run) -> list[Track]:
    """The tracks of a run, those of the same tensors joined where one begins after another has ended; `run` stays as it is."""
    kept: list[Track] = []
    for track in run.tracks:
        last = next((t for t in kept if sizes(t) == sizes(track) and 0 < t.last_backward < track.first_backward), None)
        if last is None:
            kept.append(replace(track))
            continue
        steps, lost = (track.steps, len(last.pending)) if not _restored(last, track) else (_continued(last, track), 0)
        last.resumed = (*last.resumed, (len(last.steps), lost))
        last.steps, last.pending, last.last_backward = [*last.steps, *steps], track.pending, track.last_backward
    return kept


def _restored(last: Track, track: Track) -> bool:
    """Whether the resumed run found the gradients that the window had so far."""
    so_far = [b.contribution for b in last.pending if b.contribution is not None]
    first = track.steps[0] if track.steps else None
    if not so_far or first is None or first.total is None:
        return False
    found = raw(first) - first.total
    return found.shape == so_far[0].shape and distance(found, np.sum(so_far, axis=0)) <= RESTORED


def _continued(last: Track, track: Track) -> list[Step]:
    """The steps of the resumed run; the first with what came before it in its window."""
    first, *others = track.steps
    own = (replace(first.backwards[0], start="kept", emptied=frozenset(), moved=None), *first.backwards[1:])
    return [replace(first, backwards=(*last.pending, *own), total=raw(first)), *others]


def sizes(track: Track) -> list[int]:
    """Elements of each tensor of the optimizer."""
    return [count for _, count in track.tensors]
