"""The whole run of an optimizer, of candidate and reference: steps, rows, rates, counters, averages and reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from accumulation_harness.audit.compare.facts import RunFacts, RunSeen
from accumulation_harness.audit.compare.floors import beyond_rounding
from accumulation_harness.audit.compare.windows import compare_rows
from accumulation_harness.audit.evidence import Run, Step, Track


def run_facts(
    runs: tuple[Run, Run],
    tracks: tuple[Track, Track],
    steps: tuple[Sequence[Step], Sequence[Step]],
    nulls: Sequence[Sequence[Step]],
) -> RunFacts:
    """Each pair: of candidate and reference. `steps` and `nulls`: the effective ones of this optimizer."""
    (candidate, reference), (track, other), (mine, theirs) = runs, tracks, steps
    repeated, never, foreign = _count_rows(mine, _all_rows(track), _all_rows(other))
    return RunFacts(
        accumulation_steps=candidate.accumulation_steps,
        track=track.name,
        mine=_seen(candidate, track, mine),
        reference=_seen(reference, other, theirs),
        windows=tuple(compare_rows(a, b) for a, b in zip(mine, theirs, strict=False)),
        repeated=repeated,
        never=never,
        foreign=foreign,
        lr_moves_inside=any(len({b.lrs for b in s.backwards} | {s.lrs}) > 1 for s in mine),
        shadow_moves_inside=any(len({b.shadows for b in s.backwards if b.shadows}) > 1 for s in mine),
        shadow_distances=_shadow_distances(mine, theirs, nulls),
        resumed=track.resumed,
    )


def _seen(run: Run, track: Track, steps: Sequence[Step]) -> RunSeen:
    broken = [t for t, step in enumerate(steps) if _is_broken(step)] + ([len(steps)] if _any_broken(track) else [])
    return RunSeen(
        steps=len(steps),
        idle_steps=len(track.steps) - len(steps),
        backwards=tuple(len(s.backwards) for s in steps),
        pending=len(track.pending),
        lrs=tuple(s.lrs for s in steps),
        schedule_calls=tuple(s.calls.count("schedule") for s in steps),
        horizon=run.horizon,
        state_steps=tuple(s.state_step for s in steps),
        shadow_updates=tuple(s.shadow_updates for s in steps),
        norm_updates=tuple(s.norm_updates for s in steps),
        losses=tuple(_window_loss(s) for s in steps),
        reported=run.reported,
        counts=run.counts,
        skipped=tuple(t for t, s in enumerate(steps) if s.skipped),
        broken_windows=tuple(broken),
    )


def _window_loss(step: Step) -> float:
    return sum(b.loss for b in step.backwards)


def _is_broken(step: Step) -> bool:
    return any(b.broken_forwards or not b.finite for b in step.backwards) or not np.isfinite(step.gradient).all()


def _any_broken(track: Track) -> bool:
    return any(b.broken_forwards or not b.finite for b in track.pending)


def _all_rows(track: Track) -> Counter[str]:
    backwards = [b for step in track.steps for b in step.backwards] + track.pending
    return Counter(row for b in backwards for row in b.rows or ())


def _count_rows(steps: Sequence[Step], mine: Counter[str], theirs: Counter[str]) -> tuple[tuple[int, ...], int, int]:
    """Rows used more often than in the reference's run, per step; rows never used; rows the reference does not know.

    `mine`, `theirs`: how often each row comes in the whole run of candidate and reference; nothing is counted without them.
    """
    if not mine or not theirs:
        return tuple(0 for _ in steps), 0, 0
    repeated = []
    used: Counter[str] = Counter()
    for step in steps:
        rows = step.rows or Counter()
        used += rows
        repeated.append(sum(min(rows[row], used[row] - theirs[row]) for row in rows if row in theirs and used[row] > theirs[row]))
    return tuple(repeated), sum(row not in mine for row in theirs), sum(row not in theirs for row in mine)


def _shadow_distances(
    mine: Sequence[Step], theirs: Sequence[Step], nulls: Sequence[Sequence[Step]]
) -> tuple[tuple[int, float, float], ...]:
    """(step, distance, gate) of the averaged copies, relative to how far the reference's have moved."""
    found = []
    for t, (step, wanted) in enumerate(zip(mine, theirs, strict=False)):
        if not wanted.shadows or not _same_copies(step, wanted):
            continue
        starts = [theirs[0].before[c.start : c.start + c.values.size] for c in wanted.shadows]
        if any(start.size != c.values.size for start, c in zip(starts, wanted.shadows, strict=True)):
            continue  # parameters were emptied, as those of ZeRO-3 are between their uses
        moved = [float(np.linalg.norm(c.values - start)) or math.inf for start, c in zip(starts, wanted.shadows, strict=True)]
        others = [null[t] for null in nulls if t < len(null) and _same_copies(null[t], wanted)]
        seen = [_apart(null, wanted, moved) for null in others]
        found.append((t, _apart(step, wanted, moved), beyond_rounding(seen)))
    return tuple(found)


def _same_copies(mine: Step, theirs: Step) -> bool:
    return [(c.start, c.values.size) for c in mine.shadows] == [(c.start, c.values.size) for c in theirs.shadows]


def _apart(mine: Step, theirs: Step, moved: Sequence[float]) -> float:
    """Largest distance of two averaged copies, each relative to how far it has `moved`."""
    pairs = zip(mine.shadows, theirs.shadows, moved, strict=True)
    return max(float(np.linalg.norm(a.values - b.values)) / size for a, b, size in pairs)
