"""Two runs beside each other: from vectors to the plain numbers that the rules read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from accumulation_harness.audit.compare.floors import COARSE_GATE, Aligned, Floor
from accumulation_harness.audit.compare.held import Apart, apart
from accumulation_harness.audit.compare.run import Facts, RunFacts, RunSeen
from accumulation_harness.audit.compare.step import StepFacts, Update, compared, weighed_together
from accumulation_harness.audit.compare.windows import (
    consumed_distance,
    effective,
    judged,
    of_tensors,
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
from accumulation_harness.compare.linear import cosine, distance, norm


class ShapeError(ValueError):
    """The two runs train models that cannot be compared."""


@overflow_is_expected
def facts(candidate: Run, reference: Run, floor: Floor) -> list[Facts]:
    """One `Facts` per optimizer, paired in the order in which they were made.

    Args:
        candidate: The run with micro-batches.
        reference: The run with whole batches.
        floor: What rounding explains.

    Returns:
        One for each optimizer.

    Raises:
        ShapeError: The two runs made different optimizers.
    """
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
    aligned = Aligned(runs, mine, theirs, nulls, floor.drift)
    for t, (one, usual) in enumerate(zip(mine, theirs, strict=False)):
        if one.gradient.shape != usual.gradient.shape:
            raise ShapeError(f"{track.name} holds {one.gradient.size} elements at step {t} instead of {usual.gradient.size}")
    steps = []
    for t, pair_of_steps in enumerate(zip(mine, theirs, strict=False)):
        gate = aligned.gradient[t]
        one, usual = judged(*pair_of_steps, candidate.accumulation_steps, gate)
        a, g = _judged_gradients(one, usual, gate)
        whole = StepFacts(
            candidate=candidate,
            track=track.name,
            step=t,
            mine=one,
            theirs=usual,
            before=mine[t - 1] if t else None,
            nulls=aligned.nulls(t),
            keep=~aligned.noise[t],
            a=a,
            g=g,
            gate=gate,
            buffers=tuple(each.path for each in held if each.of_model and each.window <= t + 1),
            tensors={name: compared(a[part], g[part]) for name, part in slices(one).items()},
        )
        steps.append(_alone(replace(whole, update=_update(whole, aligned)), aligned.tensors[t]))
    seen = RunSeen(reference, other, theirs)
    run = RunFacts(
        mine=RunSeen(candidate, track, mine, seen),
        reference=seen,
        nulls=nulls,
        apart=held if index == 0 else (),
        enters=floor.enters,
    )
    return Facts(run, tuple(weighed_together(steps)))


def _judged_gradients(mine: Step, theirs: Step, gate: float) -> tuple[Vector, Vector]:
    """Those before clipping, where both arms are clipped alike."""
    bounds = (mine.clip is None) == (theirs.clip is None)
    return (_to_one_limit(mine, theirs, gate), theirs.unclipped) if bounds else (mine.gradient, theirs.gradient)


def _alone(whole: StepFacts, allowed: Sequence[Vector]) -> StepFacts:
    """Of the tensors whose gradients differ, where others are known to agree."""
    mine, theirs = whole.mine, whole.theirs
    if mine.skipped or theirs.skipped:
        return whole
    pairs = [(whole.a, whole.g), (mine.gradient, theirs.gradient), (mine.sums, theirs.sums)]
    for (x, y), (_, counts), known in zip(pairs, views(theirs), allowed, strict=False):
        if x is None or y is None or x.shape != y.shape or not (np.isfinite(x).all() and np.isfinite(y).all()):
            continue
        sizes = norms_by(counts, y)
        bounds = np.where(sizes > 0, known * sizes, known)
        off = norms_by(counts, x - y) > bounds
        agree = ~off & (sizes > 0) & (known <= COARSE_GATE)
        if not off.any():
            continue
        if not agree.any():
            break
        places, size = np.flatnonzero(off).tolist(), norm(sizes[off])
        own = mine.elements(places)
        by_itself, cut, usual = _apart(mine, theirs, own)
        return replace(
            whole,
            mine=of_tensors(cut, places),
            theirs=of_tensors(usual, places),
            by_itself=by_itself,
            before=of_tensors(whole.before, places) if whole.before else None,
            nulls=[of_tensors(null, places) for null in whole.nulls],
            keep=whole.keep[own],
            a=whole.a[own],
            g=whole.g[own],
            gate=norm(bounds[off]) / size if size else 0.0,
            only=tuple(mine.tensors[place][0] for place in places),
        )
    return whole


def _apart(mine: Step, theirs: Step, own: np.ndarray) -> tuple[bool, Step, Step]:
    """Without the backwards that reach other elements alone, where a window has as many of them at N=1: of no micro-batch.

    Returns:
        Whether there are some and all others reach these elements alone; both steps.
    """
    given, usual = ([b for b in step.backwards if b.contribution is None or b.contribution[own].any()] for step in (mine, theirs))
    away = len(theirs.backwards) - len(usual)
    if not (given and usual) or not away or len(mine.backwards) - len(given) != away or len(given) <= away:
        return False, mine, theirs
    others = np.delete(np.arange(mine.gradient.size), own)
    alone = not any(b.contribution is None or b.contribution[others].any() for b in given)
    cut = [
        replace(step, backwards=(replace(kept[0], start=step.backwards[0].start), *kept[1:]))
        for step, kept in ((mine, given), (theirs, usual))
    ]
    return alone, cut[0], cut[1]


def _update(whole: StepFacts, allowed: Aligned) -> Update:
    """Of the tensor that is farthest beyond its gate."""
    mine, theirs, keep, gates = whole.mine, whole.theirs, whole.keep, allowed.update[whole.step]
    distances = update_distances(mine, theirs, keep)
    off = np.flatnonzero(distances > gates)
    worst = max(range(len(gates)), key=lambda i: distances[i] / gates[i] if gates[i] else distances[i], default=None)
    if worst is None:
        return Update()
    of_these = keep & np.repeat(np.isin(np.arange(len(gates)), off), theirs.counts) if len(off) else keep
    others = len(off) < np.count_nonzero(np.isfinite(gates))
    return Update(
        distance=float(distances[worst]),
        gate=float(gates[worst]),
        only=tuple(theirs.tensors[i][0] for i in off) if others else (),
        known=float(np.repeat(np.isfinite(gates), theirs.counts).mean()),
        along_weights=_along(mine.movement - theirs.movement, theirs.before, of_these),
        state_distance=state_distance(mine, theirs),
        state_gate=allowed.state[whole.step],
    )


def _to_one_limit(mine: Step, theirs: Step, gate: float) -> Vector:
    """The gradient before clipping; clipping N g to N c and dividing by N afterwards is clipping g to c."""
    a, own, usual = mine.unclipped, mine.clip, theirs.clip
    if own is None or usual is None or own.limit == usual.limit:
        return a
    if own.scale != 1 or not own.limit > 0 or not consumed_distance(mine, theirs) <= gate:
        return a
    divided = a * (usual.limit / own.limit)
    return divided if distance(divided, theirs.unclipped) <= gate else a


def _along(difference: Vector, direction: Vector, keep: np.ndarray) -> float:
    """What is left of `difference` outside `direction`, relative; 1 when it points the other way (no shrinking)."""
    d, p = difference[keep], direction[keep]
    size = norm(d)
    return math.sqrt(max(0.0, 1 - min(1.0, cosine(d, p) ** 2))) if size and cosine(d, p) < 0 else 1.0
