"""How far rounding moves what is compared: measured on runs that do the same computation as the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from accumulation_harness.audit.compare.windows import (
    consumed_distance,
    counts_of,
    movement,
    raw,
    relative,
    state_distance,
    update_distances,
    views,
)
from accumulation_harness.audit.evidence import FLOAT32, Run, Step, Vector, norms_by
from accumulation_harness.compare.linear import distance

# A distance that rounding explains is at most this many times the largest one seen among equal computations. Correct loops were
# seen at 0.02 to 1.2 times it (float32) and 0.2 times (bfloat16 autocast).
FACTOR, COARSE_FACTOR = 10.0, 4.0
COARSE_ROUNDOFF = 1e-5  # arithmetic rounded to more than this is coarse
COARSE_GATE = 1e-2  # relative; in finer arithmetic, a gate above this leaves room for faults
# An update is known to this, or in finer arithmetic than float32 to as many roundings; a buffer and an average likewise.
LEAST, LEAST_ROUNDINGS = 1e-3, 2e4
NOISE = 1e3  # Adam divides a gradient by its own size: an element below so many of its measured errors moves by noise
DISAGREE = 0.01  # relative; an element about whose update equal computations disagree by more moves by noise
BLAMED = 1e-6  # chance that a tensor of a right loop leaves its gate
FEW = 0.8  # a deviation is at most this share of a typical one, times x, with a chance of x: the density of a normal one at 0


@dataclass(frozen=True)
class Floor:
    """Runs that do the same computation as the reference, rounded differently."""

    nulls: Sequence[Run]
    drift: bool  # whether the runs go their own way (a null's distance then counts for all later steps)
    kept: Mapping[str, bool | None] = field(default_factory=dict)  # by path, whether something goes on from what it was


@dataclass(frozen=True)
class Gates:
    """Per optimizer step, the largest distance that rounding explains; of the whole vector, and of each tensor alone."""

    gradient: list[float]
    state: list[float]
    tensors: list[list[Vector]]  # per step and view of its gradients (`windows.views`): [tensors]
    update: list[Vector]  # [tensors]


def gates(
    mine: Sequence[Step],
    theirs: Sequence[Step],
    nulls: Sequence[Sequence[Step]],
    noise: Sequence[np.ndarray],
    runs: tuple[Run, Run],
    *,
    drift: bool,
) -> Gates:
    """Of every step of the reference, aligned with the candidate's and with those of each null.

    `runs`: candidate and reference; `noise`: per step, a mask [P] of the elements whose update is noise.
    """
    candidate, reference = runs
    gradient, state = [], []
    moved: list[bool] = []
    factor = COARSE_FACTOR if reference.roundoff > COARSE_ROUNDOFF else FACTOR
    least = min(LEAST, LEAST_ROUNDINGS * max(theirs[0].roundoffs, default=FLOAT32)) if theirs else LEAST
    for t, step in enumerate(theirs):
        others = [null[t] for null in nulls if t < len(null)]
        own = mine[t] if t < len(mine) else step
        seen = [distance(raw(o), raw(step)) for o in others] + [consumed_distance(o, step) for o in others]
        moved.append(_worst(seen) > 0)
        summing = _summing(own, step, candidate, reference)
        size = float(np.linalg.norm(raw(step)))
        gradient.append(max(factor * _worst(seen), float(np.linalg.norm(summing)) / size if 0 < size < math.inf else 0.0))
        state.append(max(FACTOR * _worst([state_distance(o, step) for o in others]), least, gradient[t]))
    if len(gradient) > 1 and (drift or not moved[0]) and gradient[0] < gradient[1]:
        gradient[0], state[0] = gradient[1], state[1]  # the first step may come before any perturbation
    if drift and len(gradient) > 1:
        gradient, state = list(np.maximum.accumulate(gradient)), list(np.maximum.accumulate(state))
    tensors = _of_views(mine, theirs, nulls, runs, factor, drift=drift)
    update = _of_updates(theirs, nulls, noise, factor, drift=drift)
    known = [np.maximum(u, np.maximum(least, v[0])) for u, v in zip(update, tensors, strict=True)]
    return Gates(gradient, state, tensors, known)


FIRST = 3  # steps that tell of each other's errors although these grow
Errors = tuple[Vector, Vector]  # of each tensor: the largest among the nulls, and how many numbers it is the largest of


def _pooled(each: Sequence[Errors], *, drift: bool) -> list[Errors]:
    """Of all steps that tell of a step's errors: of all, or of those before it where errors grow, and of the first few."""
    found = []
    for t, (own, _) in enumerate(each):
        near = [one for one in (each[: max(t + 1, FIRST)] if drift else each) if one[0].shape == own.shape]
        found.append((np.max([errors for errors, _ in near], axis=0), np.sum([numbers for _, numbers in near], axis=0)))
    return found


def _of_few(samples: Vector, factor: float) -> Vector:
    """By how many times the largest of so few deviations another one may be larger, but for a chance of `BLAMED`."""
    return np.maximum(factor, FEW * BLAMED ** -(1 / np.maximum(samples, 1.0)))


def _of_views(
    mine: Sequence[Step],
    theirs: Sequence[Step],
    nulls: Sequence[Sequence[Step]],
    runs: tuple[Run, Run],
    factor: float,
    *,
    drift: bool,
) -> list[list[Vector]]:
    """Per step, the gate of each tensor in each view of it: by the errors of the nulls, and their number."""
    found: list[list[Vector]] = [[] for _ in theirs]
    for view in range(max((len(views(step)) for step in theirs), default=0)):
        each = [_errors(view, step, [null[t] for null in nulls if t < len(null)]) for t, step in enumerate(theirs)]
        for t, (step, (errors, numbers)) in enumerate(zip(theirs, _pooled(each, drift=drift), strict=True)):
            if view >= len(views(step)):
                continue
            values, counts = views(step)[view]
            sizes, u = norms_by(counts, values), np.array(step.roundoffs)
            errors = np.maximum(errors, u * np.where(sizes > 0, sizes, float(np.linalg.norm(sizes))))
            summing = _summing(mine[t] if t < len(mine) else step, step, *runs) if view < 2 else 0.0
            allowed = np.maximum(_of_few(numbers, factor) * errors, summing)
            gate = np.where(sizes > 0, relative(allowed, sizes), allowed)
            found[t].append(np.where((numbers > 0) & ~np.isnan(gate), gate, math.inf))
    return found


def _errors(view: int, step: Step, others: Sequence[Step]) -> Errors:
    """Of the gradients of one step."""
    errors, numbers = np.zeros(len(step.tensors)), np.zeros(len(step.tensors))
    for other in others:
        apart = _apart_in(view, other, step)
        if apart is not None and apart.any():
            errors, numbers = np.maximum(errors, apart), numbers + np.array(views(step)[view][1])
    return errors, numbers


def _apart_in(view: int, null: Step, step: Step) -> Vector | None:
    """[tensors] How far a null's gradients are from those of the step; None where they cannot be compared.

    No null moves weights that are handed over: then it is at least a rounding of each number.
    """
    a, b = views(null), views(step)
    if view >= min(len(a), len(b)) or a[view][0].shape != b[view][0].shape:
        return None
    apart = norms_by(b[view][1], a[view][0] - b[view][0])
    if is_handed(step):
        apart = np.maximum(apart, np.array(step.roundoffs) * norms_by(b[view][1], b[view][0]))
    return apart if np.isfinite(apart).all() else None


def is_handed(step: Step) -> bool:
    """Whether the function has handed it over: nothing is known of its optimizer."""
    return not step.lrs


def _of_updates(
    theirs: Sequence[Step], nulls: Sequence[Sequence[Step]], noise: Sequence[np.ndarray], factor: float, *, drift: bool
) -> list[Vector]:
    """Per step, the gate of each tensor's update, but for the least one; infinite where noise decides most of its elements."""
    each = []
    for t, step in enumerate(theirs):
        others = [update_distances(null[t], step, ~noise[t]) for null in nulls if t < len(null)]
        finite = [np.zeros(len(step.tensors)), *(np.where(np.isfinite(apart), apart, 0.0) for apart in others)]
        worst = np.max(finite, axis=0)
        if is_handed(step):
            moved = norms_by(counts_of(step), movement(step))
            worst = np.maximum(worst, relative(2 * np.array(step.roundoffs) * norms_by(counts_of(step), step.before), moved))
        each.append((worst, len(others) * norms_by(counts_of(step), (~noise[t]).astype(float)) ** 2))
    found = [_of_few(numbers, factor) * worst for worst, numbers in _pooled(each, drift=drift)]
    for t, step in enumerate(theirs):
        jumping = norms_by(counts_of(step), (noise[t] & (raw(step) != 0)).astype(float)) ** 2
        found[t] = np.where(jumping > np.array(counts_of(step)) / 2, math.inf, found[t])
    return found


def _summing(mine: Step, theirs: Step, candidate: Run, reference: Run) -> Vector:
    """[tensors] Rounding of the sum itself: (terms) * u * ||sum_k |c_k|||, u of the accumulator (Higham 1993)."""
    u = np.maximum(mine.roundoffs, theirs.roundoffs)
    if not mine.backwards and not theirs.backwards:  # weights were handed over: an update is seen through them
        return FACTOR * 2 * u * norms_by(counts_of(theirs), theirs.before)
    count, rows = len(mine.backwards), candidate.batch_size * candidate.accumulation_steps
    spreads = np.array(mine.spreads)
    if not count or spreads.shape != u.shape or not np.isfinite(spreads).all():
        return np.zeros(len(theirs.tensors))
    return np.asarray(((count + 1) * u + rows * np.minimum(u, FLOAT32)) * spreads)


def beyond_rounding(seen: Sequence[float]) -> float:
    """The gate of a buffer or an average of weights, from its relative distances among equal computations."""
    return max(FACTOR * max(seen, default=0.0), LEAST)


def _worst(values: Sequence[float]) -> float:
    return max((v for v in values if math.isfinite(v)), default=0.0)


def noisy(mine: Sequence[Step], theirs: Sequence[Step], nulls: Sequence[Sequence[Step]]) -> list[np.ndarray]:
    """Cumulative masks [P]: elements whose update the nulls do not agree about, or whose gradient is near its measured error.

    Those that have no gradient at all, here, in the reference or in a null, are known.
    """
    masks: list[np.ndarray] = []
    for t, step in enumerate(theirs):
        now = np.zeros(step.before.shape, dtype=bool)
        gradient, counts = np.abs(raw(step)), counts_of(step)
        for null in nulls:
            if t >= len(null) or null[t].after.shape != step.after.shape:
                continue
            other, own = movement(null[t]), movement(step)
            now |= np.abs(other - own) > DISAGREE * np.abs(own)
            apart = _apart_in(0, null[t], step)
            if apart is not None and gradient.shape == now.shape:
                errors = np.repeat(apart / np.sqrt(np.maximum(counts, 1)), counts)
                some = (gradient > 0) | (raw(null[t]) != 0)
                if t < len(mine) and raw(mine[t]).shape == some.shape:
                    some |= raw(mine[t]) != 0
                now |= some & (gradient < NOISE * errors)
        masks.append(masks[-1] | now if masks and masks[-1].shape == now.shape else now)
    return masks
