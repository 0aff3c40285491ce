"""Several ranks of one run: their rows put together, and whether they hold the same gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from harness.audit.evidence import Backward, Finding, Run, Step, Track


def pooled(runs: Sequence[Run]) -> Run:
    """The first rank's run, with the rows of all ranks in each window, and an error if any rank raised."""
    first = runs[0]
    first.ranks = len(runs)
    errors = [f"rank {rank}: {run.error}" for rank, run in enumerate(runs) if run.error is not None]
    if errors and len(runs) > 1:
        first.error = "; ".join(errors)
    first.rank_distances = rank_distances(runs)
    for index, track in enumerate(first.tracks):
        others = [run.tracks[index] for run in runs[1:] if index < len(run.tracks)]
        for t, step in enumerate(track.steps):
            track.steps[t] = _pooled_step(step, [other.steps[t] for other in others if t < len(other.steps)])
    return first


def _pooled_step(step: Step, others: Sequence[Step]) -> Step:
    backwards = []
    for k, backward in enumerate(step.backwards):
        same = [other.backwards[k] for other in others if k < len(other.backwards)]
        backwards.append(_pooled_backward(backward, same))
    return replace(step, backwards=tuple(backwards))


def _pooled_backward(backward: Backward, others: Sequence[Backward]) -> Backward:
    if backward.rows is None or any(other.rows is None for other in others):
        return replace(backward, rows=None)
    return replace(backward, rows=tuple(chain(backward.rows, *(other.rows or () for other in others))))


def rank_distances(runs: Sequence[Run]) -> tuple[float, ...]:
    """Per optimizer step, the largest relative distance of any rank's gradient from the first rank's."""
    distances: list[float] = []
    for tracks in zip(*(run.tracks for run in runs), strict=False):
        for t, pair in enumerate(_per_step(tracks)):
            distances += [0.0] * (t + 1 - len(distances))
            distances[t] = max(distances[t], pair)
    return tuple(distances)


def _per_step(tracks: Sequence[Track]) -> list[float]:
    found = []
    for steps in zip(*(track.steps for track in tracks), strict=False):
        first = steps[0].gradient
        size = float(np.linalg.norm(first)) or 1.0
        found.append(
            max(
                (float(np.linalg.norm(s.gradient - first)) / size for s in steps[1:] if s.gradient.shape == first.shape),
                default=0.0,
            )
        )
    return found


def disagreement(candidate: Run, gate: float) -> list[Finding]:
    """Ranks that step on gradients of their own. All arms of the same run may have it; it is wrong at every N."""
    for t, distance in enumerate(candidate.rank_distances):
        if not distance <= gate:
            evidence = {"distance_between_ranks": distance, "gate": gate, "ranks": candidate.ranks}
            message = f"the ranks step on different gradients ({distance:.2g} apart): they are not averaged before the step"
            return [Finding(candidate.accumulation_steps, t, "replicas_not_synchronised", evidence, message)]
    return []
