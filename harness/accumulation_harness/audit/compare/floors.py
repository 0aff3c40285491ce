"""How far rounding moves what is compared: measured on runs that do the same computation as the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from accumulation_harness.audit.compare.windows import (
    consumed_distance,
    relative,
    state_distance,
    update_distances,
    views,
)
from accumulation_harness.audit.evidence import FLOAT32, Run, Step, Vector, norms_by
from accumulation_harness.compare.linear import distance, norm

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
    enters: bool = False  # whether the gradients that are taken are made of some of that, besides what the backwards give


FIRST = 3  # steps that tell of each other's errors although these grow
Errors = tuple[Vector, Vector]  # of each tensor: the largest among the nulls, and how many numbers it is the largest of


@dataclass(frozen=True)
class Aligned:
    """The steps of one optimizer in candidate and reference, beside those of the runs that do the same as the reference.

    Gates are the largest distances that rounding explains, one for each step of the reference.
    """

    runs: tuple[Run, Run]  # candidate and reference
    mine: Sequence[Step]
    theirs: Sequence[Step]
    every: Sequence[Sequence[Step]]  # of each null
    drift: bool  # whether the runs go their own way

    def nulls(self, t: int) -> list[Step]:
        """One step of each null."""
        return [null[t] for null in self.every if t < len(null)]

    @property
    def factor(self) -> float:
        """By which a distance may be larger than the largest one seen among equal computations."""
        return COARSE_FACTOR if self.runs[1].roundoff > COARSE_ROUNDOFF else FACTOR

    @property
    def least(self) -> float:
        """How well an update, a buffer or an average is known at best."""
        return min(LEAST, LEAST_ROUNDINGS * max(self.theirs[0].roundoffs, default=FLOAT32)) if self.theirs else LEAST

    @cached_property
    def measured(self) -> bool:
        """Whether nulls do more than to repeat the reference, which is all that they do where `hand` is not listened to."""
        return not any(map(is_handed, self.theirs)) or any(moves(self.nulls(t), step) for t, step in enumerate(self.theirs))

    def _roundoffs(self, step: Step) -> Vector:
        """[tensors] Of their formats; where no null shows the arithmetic, no less than its own."""
        return np.maximum(step.roundoffs, 0.0 if self.measured else self.runs[1].arithmetic)

    @cached_property
    def _seen(self) -> list[float]:
        """The largest distance of a null's gradient, before and after clipping."""
        pairs = [[(null, step) for null in self.nulls(t)] for t, step in enumerate(self.theirs)]
        before = [_worst([distance(a.unclipped, b.unclipped) for a, b in each]) for each in pairs]
        return [max(own, _worst([consumed_distance(a, b) for a, b in each])) for own, each in zip(before, pairs, strict=True)]

    @cached_property
    def _each(self) -> list[float]:
        """By what each step alone shows."""
        sizes = [norm(step.unclipped) for step in self.theirs]
        summing = [norm(self._summing(t)) / size if 0 < size < math.inf else 0.0 for t, size in enumerate(sizes)]
        return [max(self.factor * seen, least) for seen, least in zip(self._seen, summing, strict=True)]

    @cached_property
    def gradient(self) -> list[float]:
        """Gates of the whole vector."""
        return self._grown(self._each)

    @cached_property
    def state(self) -> list[float]:
        """Gates of the entries of the optimizer's state."""
        own = [FACTOR * _worst([state_distance(null, step) for null in self.nulls(t)]) for t, step in enumerate(self.theirs)]
        return self._grown([max(state, self.least, gradient) for state, gradient in zip(own, self._each, strict=True)])

    def _grown(self, found: list[float]) -> list[float]:
        """The first step may come before any perturbation; and where runs go their own way, distances grow."""
        if len(found) > 1 and (self.drift or not self._seen[0]) and self._each[0] < self._each[1]:
            found = [found[1], *found[1:]]
        return np.maximum.accumulate(found).tolist() if self.drift and found else found

    @cached_property
    def tensors(self) -> list[list[Vector]]:
        """Per step and view of its gradients (`windows.views`) the gates [tensors]: by the nulls' errors, and their number."""
        found: list[list[Vector]] = [[] for _ in self.theirs]
        for view in range(max((len(views(step)) for step in self.theirs), default=0)):
            each = [self._errors(view, t) for t in range(len(self.theirs))]
            for t, (step, (errors, numbers)) in enumerate(zip(self.theirs, self._pooled(each), strict=True)):
                if view >= len(views(step)):
                    continue
                values, counts = views(step)[view]
                sizes, u = norms_by(counts, values), np.array(step.roundoffs)
                errors = np.maximum(errors, u * np.where(sizes > 0, sizes, norm(sizes)))
                allowed = np.maximum(self._of_few(numbers) * errors, self._summing(t) if view < 2 else 0.0)
                gate = np.where(sizes > 0, relative(allowed, sizes), allowed)
                found[t].append(np.where((numbers > 0) & ~np.isnan(gate), gate, math.inf))
        return found

    def _errors(self, view: int, t: int) -> Errors:
        """Of the gradients of one step."""
        step = self.theirs[t]
        errors, numbers = np.zeros(len(step.tensors)), np.zeros(len(step.tensors))
        for null in self.nulls(t):
            apart = self._apart_in(view, null, step)
            if apart is not None and apart.any():
                errors, numbers = np.maximum(errors, apart), numbers + np.array(views(step)[view][1])
        return errors, numbers

    def _apart_in(self, view: int, null: Step, step: Step) -> Vector | None:
        """[tensors] How far a null's gradients are from those of the step; None where they cannot be compared.

        Where no null moves, a rounding of the whole gradient, shared out evenly: a tensor's own may be small since its parts
        cancel.

        Returns:
            Distances ||a - b|| by tensor, float64.
        """
        a, b = views(null), views(step)
        if view >= min(len(a), len(b)) or a[view][0].shape != b[view][0].shape:
            return None
        values, counts = b[view]
        apart = norms_by(counts, a[view][0] - values)
        if not self.measured:
            even = norm(values) * np.sqrt(np.array(counts) / max(1, sum(counts)))
            apart = np.maximum(apart, self._roundoffs(step) * np.maximum(even, norms_by(counts, values)))
        return apart if np.isfinite(apart).all() else None

    def _pooled(self, each: Sequence[Errors]) -> list[Errors]:
        """Of all steps that tell of a step's errors: of all, or of those before it where errors grow, and of the first few."""
        found = []
        for t, (own, _) in enumerate(each):
            near = [one for one in (each[: max(t + 1, FIRST)] if self.drift else each) if one[0].shape == own.shape]
            found.append((np.max([errors for errors, _ in near], axis=0), np.sum([numbers for _, numbers in near], axis=0)))
        return found

    def _of_few(self, samples: Vector) -> Vector:
        """By how many times the largest of so few deviations another one may be larger, but for a chance of `BLAMED`."""
        return np.maximum(self.factor, FEW * BLAMED ** -(1 / np.maximum(samples, 1.0)))

    @cached_property
    def update(self) -> list[Vector]:
        """Gates [tensors] of the update; infinite where noise decides most of a tensor's elements."""
        each = []
        for t, step in enumerate(self.theirs):
            others = [update_distances(null, step, ~self.noise[t]) for null in self.nulls(t)]
            finite = [np.zeros(len(step.tensors)), *(np.where(np.isfinite(apart), apart, 0.0) for apart in others)]
            worst, counts = np.max(finite, axis=0), step.counts
            if is_handed(step):
                stored = 2 * np.array(step.roundoffs) * norms_by(counts, step.before)
                worst = np.maximum(worst, relative(stored, norms_by(counts, step.movement)))
            each.append((worst, len(others) * norms_by(counts, (~self.noise[t]).astype(float)) ** 2))
        found = []
        for t, (worst, numbers) in enumerate(self._pooled(each)):
            counts = self.theirs[t].counts
            jumping = norms_by(counts, (self.noise[t] & (self.theirs[t].unclipped != 0)).astype(float)) ** 2
            gate = np.maximum(self._of_few(numbers) * worst, np.maximum(self.least, self.tensors[t][0]))
            found.append(np.where(jumping > np.array(counts) / 2, math.inf, gate))
        return found

    def _summing(self, t: int) -> Vector:
        """[tensors] Rounding of the sum itself: (terms) * u * ||sum_k |c_k|||, u of the accumulator (Higham 1993)."""
        (candidate, _), theirs = self.runs, self.theirs[t]
        mine = self.mine[t] if t < len(self.mine) else theirs
        u = np.maximum(self._roundoffs(mine), self._roundoffs(theirs))
        count, rows = len(mine.backwards), candidate.batch_size * candidate.accumulation_steps
        spreads = np.array(mine.spreads)
        if not mine.backwards and not theirs.backwards:
            if not is_handed(theirs) or stands_in(theirs):  # an update is seen through the weights
                return FACTOR * 2 * u * norms_by(theirs.counts, theirs.before)
            count, spreads = candidate.accumulation_steps, norms_by(theirs.counts, theirs.gradient)
        if not count or spreads.shape != u.shape or not np.isfinite(spreads).all():
            return np.zeros(len(theirs.tensors))
        return np.asarray(((count + 1) * u + rows * np.minimum(u, FLOAT32)) * spreads)

    @cached_property
    def noise(self) -> list[np.ndarray]:
        """Cumulative masks [P]: elements whose update the nulls do not agree about, or whose gradient is near its measured error.

        Those that have no gradient at all, here, in the reference or in a null, are known.
        """
        masks: list[np.ndarray] = []
        for t, step in enumerate(self.theirs):
            now = np.zeros(step.before.shape, dtype=bool)
            gradient, counts = np.abs(step.unclipped), step.counts
            for null in self.nulls(t):
                if null.after.shape != step.after.shape:
                    continue
                other, own = null.movement, step.movement
                now |= np.abs(other - own) > DISAGREE * np.abs(own)
                apart = self._apart_in(0, null, step)
                if apart is not None and gradient.shape == now.shape:
                    errors = np.repeat(apart / np.sqrt(np.maximum(counts, 1)), counts)
                    some = (gradient > 0) | (null.unclipped != 0)
                    if t < len(self.mine) and self.mine[t].unclipped.shape == some.shape:
                        some |= self.mine[t].unclipped != 0
                    now |= some & (gradient < NOISE * errors)
            masks.append(masks[-1] | now if masks and masks[-1].shape == now.shape else now)
        return masks


def is_handed(step: Step) -> bool:
    """Whether the function has handed it over: nothing is known of its optimizer.

    Args:
        step: A recorded optimizer step.

    Returns:
        True where a step came from `hand`.
    """
    return not step.lrs


def moves(nulls: Sequence[Step], step: Step) -> bool:
    """Whether the weights after a step are others in some null.

    Args:
        nulls: The same step in runs that differ by rounding alone.
        step: A recorded optimizer step.

    Returns:
        True where one has other weights.
    """
    return any(not np.array_equal(null.after, step.after) for null in nulls)


def stands_in(step: Step) -> bool:
    """Whether weights alone were handed over: the update, with its sign turned, stands for the gradient.

    Args:
        step: A recorded optimizer step.

    Returns:
        True where the gradient is an update.
    """
    return is_handed(step) and not step.backwards and np.array_equal(step.gradient, step.before - step.after)


def beyond_rounding(seen: Sequence[float]) -> float:
    """The gate of a buffer or an average of weights, from its relative distances among equal computations.

    Args:
        seen: Relative distances among equal computations.

    Returns:
        The gate.
    """
    return max(FACTOR * max(seen, default=0.0), LEAST)


def _worst(values: Sequence[float]) -> float:
    return max((v for v in values if math.isfinite(v)), default=0.0)
