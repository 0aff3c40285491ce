"""Two runs beside each other: from vectors to the plain numbers that the rules read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from accumulation_harness.audit.compare.facts import Apart, Compared, Update
from accumulation_harness.audit.compare.floors import COARSE_GATE, Floor, Gates, gates, noisy
from accumulation_harness.audit.compare.held import apart
from accumulation_harness.audit.compare.run import Facts, RunFacts, RunSeen
from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.compare.windows import (
    clipped_once,
    consumed_distance,
    counts_of,
    effective,
    finite,
    judged,
    movement,
    of_tensors,
    raw,
    sizes,
    slices,
    state_distance,
    stitched,
    until_not_finite,
    update_distances,
    views,
    without_constants,
    without_preparation,
)
from accumulation_harness.audit.evidence import Run, Step, Track, Vector, norms_by, overflow_is_expected
from accumulation_harness.compare.linear import cosine, distance


@dataclass(frozen=True)
class Aligned:
    """One optimizer step of the candidate and of the reference."""

    step: int
    mine: Step
    theirs: Step
    before: Step | None  # the candidate's step before
    nulls: Sequence[Step]  # the same step of the runs that do the same computation as the reference
    keep: np.ndarray  # mask [P] of the elements whose update is more than noise


class ShapeError(ValueError):
    """The two runs train models that cannot be compared."""


@overflow_is_expected
def facts(candidate: Run, reference: Run, floor: Floor) -> list[Facts]:
    """One `Facts` per optimizer, paired in the order in which they were made. Raises `ShapeError` when they do not pair."""
    mine, theirs = stitched(candidate), stitched(reference)
    if len(mine) != len(theirs):
        raise ShapeError(f"{len(mine)} optimizers instead of {len(theirs)}")
    pairs = zip(mine, theirs, strict=True)
    held = apart(candidate.held, reference.held, [null.held for null in floor.nulls], floor.kept)
    return [_track_facts((candidate, reference), floor, pair, index, held) for index, pair in enumerate(pairs)]


def _track_facts(runs: tuple[Run, Run], floor: Floor, pair: tuple[Track, Track], index: int, held: tuple[Apart, ...]) -> Facts:
    (candidate, reference), (track, other) = runs, without_constants(*pair)
    if sizes(track) != sizes(other):
        raise ShapeError(f"{track.name} holds tensors of sizes {sizes(track)[:12]} instead of {sizes(other)[:12]}")
    mine, theirs = until_not_finite(*without_preparation(track, other))
    nulls = [effective(n.tracks[index]) for n in floor.nulls if len(n.tracks) == len(reference.tracks)]
    noise = noisy(mine, theirs, nulls)
    allowed = gates(mine, theirs, nulls, noise, runs, drift=floor.drift)
    for t, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a.gradient.shape != b.gradient.shape:
            raise ShapeError(f"{track.name} holds {a.gradient.size} elements at step {t} instead of {b.gradient.size}")
    steps = []
    for t, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        others = [null[t] for null in nulls if t < len(null)]
        aligned = Aligned(t, a, b, mine[t - 1] if t else None, others, ~noise[t])
        buffers = tuple(one.path for one in held if one.of_model and one.window <= t + 1)
        steps.append(_step_facts(track.name, candidate, aligned, allowed, buffers))
    own, usual = RunSeen(candidate, track, mine), RunSeen(reference, other, theirs)
    return Facts(RunFacts(mine=own, reference=usual, nulls=nulls, apart=held if index == 0 else ()), tuple(steps))


def _step_facts(track: str, candidate: Run, aligned: Aligned, allowed: Gates, buffers: tuple[str, ...]) -> StepFacts:
    t, before, nulls = aligned.step, aligned.before, aligned.nulls
    gate = allowed.gradient[t]
    mine, theirs = judged(aligned.mine, aligned.theirs, candidate.accumulation_steps, gate)
    a, g = _judged_gradients(mine, theirs, gate)
    tensors = {name: _compared(a[part], g[part]) for name, part in slices(mine).items()}
    keep, only = aligned.keep, tuple[str, ...]()
    if chosen := _alone(mine, theirs, a, g, allowed.tensors[t]):
        places, gate = chosen
        only = tuple(mine.tensors[place][0] for place in places)
        keep = keep[np.concatenate([np.arange(*_edges(mine)[place : place + 2]) for place in places])]
        a, g = of_tensors(replace(mine, gradient=a), places).gradient, of_tensors(replace(theirs, gradient=g), places).gradient
        mine, theirs = of_tensors(mine, places), of_tensors(theirs, places)
        before, nulls = of_tensors(before, places) if before else None, [of_tensors(null, places) for null in nulls]
    skipped = mine.skipped and theirs.skipped  # a GradScaler left both out
    apart, raw_apart = (0.0, 0.0) if skipped else (finite(consumed_distance(mine, theirs)), finite(distance(a, g)))
    consumed, unclipped = _compared(mine.gradient, theirs.gradient, apart), _compared(a, g, raw_apart)
    # a gradient that differs outside the sample alone is wrong, and no prediction of what was kept says how
    wrong = not skipped and not (finite(distance(mine.gradient, theirs.gradient)) <= gate and unclipped.distance <= gate)
    return StepFacts(
        candidate=candidate,
        track=track,
        step=t,
        mine=mine,
        theirs=theirs,
        before=before,
        nulls=nulls,
        keep=keep,
        a=a,
        g=g,
        gate=gate,
        whole_gate=allowed.gradient[t],
        consumed=consumed,
        raw=unclipped,
        only=only,
        buffers=buffers,
        wrong=wrong,
        update=_update(aligned, allowed),
        tensors=tensors,
    )


def _edges(step: Step) -> np.ndarray:
    return np.cumsum([0, *counts_of(step)])


def _judged_gradients(mine: Step, theirs: Step, gate: float) -> tuple[Vector, Vector]:
    """Those before clipping, where both arms are clipped alike."""
    bounds = clipped_once(mine) == clipped_once(theirs)
    return (_to_one_limit(mine, theirs, gate), raw(theirs)) if bounds else (mine.gradient, theirs.gradient)


def _alone(mine: Step, theirs: Step, a: Vector, g: Vector, allowed: Sequence[Vector]) -> tuple[tuple[int, ...], float] | None:
    """The places of the tensors whose gradients differ, and the gate of these together; None where no other is known to agree."""
    pairs = [(a, g), (mine.gradient, theirs.gradient), *([(mine.sums, theirs.sums)] if mine.sums is not None else [])]
    if mine.skipped or theirs.skipped:
        return None
    for (x, y), (_, counts), known in zip(pairs, views(theirs), allowed, strict=False):
        if x is None or y is None or x.shape != y.shape or not (np.isfinite(x).all() and np.isfinite(y).all()):
            continue
        sizes = norms_by(counts, y)
        apart = norms_by(counts, x - y)
        bounds = np.where(sizes > 0, known * sizes, known)
        off = apart > bounds
        agree = ~off & (sizes > 0) & (known <= COARSE_GATE)
        if off.any() and agree.any():
            size = float(np.linalg.norm(sizes[off]))
            return tuple(np.flatnonzero(off).tolist()), float(np.linalg.norm(bounds[off])) / size if size else 0.0
        if off.any():
            return None
    return None


def _update(aligned: Aligned, allowed: Gates) -> Update:
    """Of the tensor that is farthest beyond its gate."""
    mine, theirs, keep, gates = aligned.mine, aligned.theirs, aligned.keep, allowed.update[aligned.step]
    distances = update_distances(mine, theirs, keep)
    off = np.flatnonzero(distances > gates)
    worst = max(range(len(gates)), key=lambda i: distances[i] / gates[i] if gates[i] else distances[i], default=None)
    if worst is None:
        return Update()
    of_these = keep & np.repeat(np.isin(np.arange(len(gates)), off), counts_of(theirs)) if len(off) else keep
    others = len(off) < np.count_nonzero(np.isfinite(gates))
    return Update(
        distance=float(distances[worst]),
        gate=float(gates[worst]),
        only=tuple(theirs.tensors[i][0] for i in off) if others else (),
        known=float(np.repeat(np.isfinite(gates), counts_of(theirs)).mean()),
        along_weights=_along(movement(mine) - movement(theirs), theirs.before, of_these),
        state_distance=state_distance(mine, theirs),
        state_gate=allowed.state[aligned.step],
    )


def _to_one_limit(mine: Step, theirs: Step, gate: float) -> Vector:
    """The gradient before clipping; clipping N g to N c and dividing by N afterwards is clipping g to c."""
    a = raw(mine)
    if not (clipped_once(mine) and clipped_once(theirs)) or mine.clips[0].limit == theirs.clips[0].limit:
        return a
    if mine.clips[0].scale != 1 or not mine.clips[0].limit > 0 or not consumed_distance(mine, theirs) <= gate:
        return a
    divided = a * (theirs.clips[0].limit / mine.clips[0].limit)
    return divided if distance(divided, raw(theirs)) <= gate else a


def _compared(a: Vector, g: Vector, distance: float | None = None) -> Compared:
    own, size = float(np.linalg.norm(a)), float(np.linalg.norm(g))
    if not size > 0:  # nothing to compare with: never a pass
        return Compared(distance=math.nan if distance is None else distance, scale=math.nan, cosine=math.nan)
    apart = float(np.linalg.norm(a - g)) / size if distance is None else distance
    return Compared(distance=apart, scale=own / size, cosine=cosine(a, g))


def _along(difference: Vector, direction: Vector, keep: np.ndarray) -> float:
    """What is left of `difference` outside `direction`, relative; 1 when it points the other way (no shrinking)."""
    d, p = difference[keep], direction[keep]
    size = float(np.linalg.norm(d))
    return math.sqrt(max(0.0, 1 - min(1.0, cosine(d, p) ** 2))) if size and cosine(d, p) < 0 else 1.0
