"""How far rounding moves what is compared: measured on runs that do the same computation as the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accumulation_harness.audit.compare.windows import consumed_distance, distance, raw, state_distance, update_distance
from accumulation_harness.audit.evidence import FLOAT32, Run, Step

# A distance that rounding explains is at most this many times the largest one seen among equal computations. Correct loops were
# seen at 0.02 to 1.2 times it (float32) and 0.2 times (bfloat16 autocast).
FACTOR, COARSE_FACTOR = 10.0, 4.0
COARSE_ROUNDOFF = 1e-5  # arithmetic rounded to more than this is coarse
COARSE_GATE = 1e-2  # relative; in finer arithmetic, a gate above this leaves room for faults
# Adam divides a gradient by its own size: an element below this many roundings of the largest one moves by noise, and no update,
# state, buffer or average is known better than one part in so many.
NOISE = 1e3
LEAST = 1 / NOISE
DISAGREE = 0.01  # relative; an element about whose update equal computations disagree by more moves by noise


@dataclass(frozen=True)
class Floor:
    """Runs that do the same computation as the reference, rounded differently."""

    nulls: Sequence[Run]
    drift: bool  # whether the runs go their own way (a null's distance then counts for all later steps)


@dataclass(frozen=True)
class Gates:
    """Per optimizer step, the largest distance that rounding explains."""

    gradient: list[float]
    update: list[float]
    state: list[float]


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
    gradient, update, state = [], [], []
    moved: list[bool] = []
    small = faint(theirs, reference)
    factor = COARSE_FACTOR if reference.roundoff > COARSE_ROUNDOFF else FACTOR
    for t, step in enumerate(theirs):
        others = [null[t] for null in nulls if t < len(null)]
        own = mine[t] if t < len(mine) else step
        seen = [distance(raw(o), raw(step)) for o in others] + [consumed_distance(o, step) for o in others]
        moved.append(_worst(seen) > 0)
        gradient.append(max(factor * _worst(seen), _summing(own, step, candidate, reference)))
        keep = ~noise[t]
        least = max(LEAST, gradient[t])  # an update is known no better than its gradient
        apart = [update_distance(o, step, of) for o in others for of in (keep, ~small[t])]  # more than faint elements: see below
        update.append(max(FACTOR * _worst(apart), least))
        state.append(max(FACTOR * _worst([state_distance(o, step) for o in others]), least))
    if len(gradient) > 1 and (drift or not moved[0]) and gradient[0] < gradient[1]:
        gradient[0], update[0], state[0] = gradient[1], update[1], state[1]  # the first step may come before any perturbation
    if drift and len(gradient) > 1:
        gradient = list(np.maximum.accumulate(gradient))
        update, state = list(np.maximum.accumulate(update)), list(np.maximum.accumulate(state))
    return Gates(gradient, update, state)


def _summing(mine: Step, theirs: Step, candidate: Run, reference: Run) -> float:
    """Rounding of the sum itself: (terms) * u * ||sum_k |c_k|| / ||g||, u of the accumulator (Higham 1993)."""
    size = float(np.linalg.norm(raw(theirs)))
    if not mine.backwards and not theirs.backwards:  # weights were handed over: float32 weights, and an update seen through them
        return max(LEAST, FACTOR * 2 * FLOAT32 * float(np.linalg.norm(theirs.before)) / size) if size else 0.0
    count, total = len(mine.backwards), mine.spread
    if not size or not count or not math.isfinite(size):
        return 0.0
    wide = max(candidate.accumulator_roundoff, reference.accumulator_roundoff)
    rows = candidate.batch_size * candidate.accumulation_steps
    return ((count + 1) * wide + rows * min(wide, FLOAT32)) * (total / size if math.isfinite(total) else 1.0)


def beyond_rounding(seen: Sequence[float]) -> float:
    """The gate of a buffer or an average of weights, from its relative distances among equal computations."""
    return max(FACTOR * max(seen, default=0.0), LEAST)


def _worst(values: Sequence[float]) -> float:
    return max((v for v in values if math.isfinite(v)), default=0.0)


def faint(theirs: Sequence[Step], reference: Run) -> list[np.ndarray]:
    """Cumulative masks: elements with a gradient near its rounding.

    Where the nulls disagree about the update of others, the step mixes elements and jumps (a basis of eigenvectors under
    rounding): no element of it is known then.
    """
    masks: list[np.ndarray] = []
    for step in theirs:
        gradient = np.abs(raw(step))
        now = gradient < NOISE * reference.roundoff * (gradient.max(initial=0.0) if np.isfinite(gradient).all() else 0.0)
        masks.append(masks[-1] | now if masks and masks[-1].shape == now.shape else now)
    return masks


def noisy(theirs: Sequence[Step], nulls: Sequence[Sequence[Step]], reference: Run) -> list[np.ndarray]:
    """Cumulative masks: elements with a gradient near its rounding, or whose update the nulls do not agree about."""
    masks: list[np.ndarray] = []
    for t, (step, small) in enumerate(zip(theirs, faint(theirs, reference), strict=True)):
        now = small.copy()
        for null in nulls:
            if t < len(null) and null[t].after.shape == step.after.shape:
                mine, own = null[t].after - null[t].before, step.after - step.before
                now |= np.abs(mine - own) > DISAGREE * np.abs(own)
        masks.append(masks[-1] | now if masks and masks[-1].shape == now.shape else now)
    return masks
