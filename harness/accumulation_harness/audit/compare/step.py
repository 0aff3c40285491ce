"""One optimizer step of a candidate beside the reference's: every quantity that rules ask for, computed when they do.

a: the candidate's gradient before clipping; g: the reference's; s: the sum of what the window's backwards gave; N: accumulation
steps; K: backwards of the window. Distances are relative to the second vector. What is not known is infinite, so that it is never
within a gate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np

from accumulation_harness.audit.compare.probes import Probe
from accumulation_harness.audit.compare.sums import (
    SAME_NORM,
    Format,
    by_forward,
    by_rank,
    clamped_parts,
    clipped_parts,
    decomposed,
    emptied_at_last,
    giving,
    lost,
    narrow_format,
    shrinking,
    since_clear,
)
from accumulation_harness.audit.compare.windows import (
    Rows,
    compare_rows,
    consumed_distance,
    evaluations,
    finite,
    slices,
)
from accumulation_harness.audit.evidence import Run, Step, Vector, given_by
from accumulation_harness.compare.linear import WeightedSum, cosine, distance, norm, off_line, proportion

FEWEST = 4  # elements below which two directions are alike by chance
LEFT_OVER = 10.0  # gates; a gradient of the step before that is smaller than this is rounding
OTHER_MOVE = 0.05  # relative; movements that differ by less are one, made of other weights
UNPROBED = Probe()
DESCENT = 0.3  # cosine of a movement and a gradient, turned around, above which one is no chance: Adam's are at 0.6 to 0.8
COARSEST_UPDATE = 1e-2  # relative; a movement that is known no better does not tell one factor from another
NO_WEIGHT = 1e-2  # below which a weight that is known so well is 0


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A vector a beside the reference's g."""

    distance: float  # ||a - g|| / ||g||
    scale: float  # ||a|| / ||g||
    cosine: float


def compared(a: Vector, g: Vector, distance: float | None = None) -> Compared:
    """Compare two gradients.

    Args:
        a: [P] gradient with micro-batches.
        g: [P] gradient of the reference.
        distance: The distance that is reported instead of the vectors' own, or None.

    Returns:
        Distance, scale, cosine and residual of `a` beside `g`.
    """
    own, size = norm(a), norm(g)
    if not size > 0:  # nothing to compare with: never a pass
        return Compared(distance=math.nan if distance is None else distance, scale=math.nan, cosine=math.nan)
    apart = norm(a - g) / size if distance is None else distance
    return Compared(distance=apart, scale=own / size, cosine=cosine(a, g))


@dataclass(frozen=True, kw_only=True)
class Update:
    """What the optimizer made of its gradient, beside the reference's; gates are what rounding explains."""

    distance: float = 0.0  # of the movements of the parameters, in the tensor that is farthest beyond its gate
    gate: float = math.inf
    only: tuple[str, ...] = ()  # the tensors that move otherwise, where others agree
    known: float = 1.0  # share of the elements whose movement rounding does not decide
    along_weights: float = math.nan  # residual of the difference of movements outside the direction of the parameters
    state_distance: float = 0.0
    state_gate: float = math.inf

    @property
    def agrees(self) -> bool:
        """Whether movement and state are within their gates."""
        return self.distance <= self.gate and self.state_distance <= self.state_gate


@dataclass(eq=False, kw_only=True)
class StepFacts:
    """One optimizer step, of all tensors or of those alone that differ where others are known to agree."""

    candidate: Run
    track: str  # name of the optimizer
    step: int  # from 0
    mine: Step
    theirs: Step
    before: Step | None  # the candidate's step before
    nulls: Sequence[Step]  # the same step of the runs that do the same computation as the reference
    keep: np.ndarray  # mask [P] of the elements whose update is more than noise
    a: Vector  # [P]
    g: Vector  # [P]
    gate: float  # largest relative distance of gradients that rounding explains
    only: tuple[str, ...] = ()  # the tensors that differ, where others are known to agree: all vectors are of these alone
    by_itself: bool = False  # whether what reaches these reaches no others, which a backward for the whole window does
    buffers: tuple[str, ...]  # that have moved otherwise than the reference's
    update: Update = Update()
    tensors: Mapping[str, Compared] = field(default_factory=dict)  # gradients before clipping, by the tensor's name
    probe: Probe = UNPROBED

    def but(self, **changed: Any) -> Self:
        """The same with other values of some quantities, and all those that are known already."""
        made = copy.copy(self)
        vars(made).update(changed)
        return made

    @cached_property
    def consumed(self) -> Compared:
        """The gradients that the optimizer took."""
        apart = 0.0 if self._skipped else finite(consumed_distance(self.mine, self.theirs))
        return compared(self.mine.gradient, self.theirs.gradient, apart)

    @cached_property
    def raw(self) -> Compared:
        """a beside g."""
        return compared(self.a, self.g, 0.0 if self._skipped else finite(distance(self.a, self.g)))

    @cached_property
    def wrong(self) -> bool:
        """Whether the gradients differ: of equal ones nothing is predicted.

        One that differs outside the sample alone is wrong, and no prediction of what was kept says how.
        """
        kept = finite(distance(self.mine.gradient, self.theirs.gradient))
        return not self._skipped and not (kept <= self.gate and self.raw.distance <= self.gate)

    @property
    def _skipped(self) -> bool:
        """Whether a GradScaler left both out."""
        return self.mine.skipped and self.theirs.skipped

    @property
    def gradients_agree(self) -> bool:
        """Before clipping as well: a fault that clipping hides is still one."""
        return (self.consumed.distance <= self.gate and self.raw.distance <= self.gate) or self.taken_inside

    @cached_property
    def taken_inside(self) -> bool:
        """Whether the movement shows that the step took another gradient than was seen: it has divided it, or added some up.

        It is that of N=1, which is its rate times its gradient (or the state agrees as well, between whose calls nothing moves),
        and is not by far what the gradient that was seen gives.
        """
        rates, update = {*self.mine.lrs, *self.theirs.lrs}, self.update
        if self.only or len(rates) != 1 or self.clipped or not update.agrees or not update.gate <= COARSEST_UPDATE:
            return False
        plain = (distance(step.movement, -max(rates) * step.gradient) for step in (self.mine, self.theirs))
        mine, theirs = (off <= COARSEST_UPDATE for off in plain)
        return not mine and (theirs or "step" in self.mine.calls_inside)

    @property
    def agrees(self) -> bool:
        """Whether gradients, movement and state are all within their gates."""
        return self.gradients_agree and self.update.agrees

    @cached_property
    def goes(self) -> float:
        """Times as far as the reference the step moves the parameters, or those alone that move otherwise; 0: elsewhere."""
        own = [part for name, part in slices(self.mine).items() if not self.update.only or name in self.update.only]
        a, b = (np.concatenate([step.movement[part] for part in own]) for step in (self.mine, self.theirs))
        return proportion(a, b)[0] if off_line(a, b) <= self.update.gate else 0.0

    @property
    def accumulation_steps(self) -> int:
        """N."""
        return self.candidate.accumulation_steps

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return self.candidate.ranks

    @property
    def roundoff(self) -> float:
        """Of the coarsest arithmetic in use."""
        return self.candidate.roundoff

    # -- the gradient beside predictions ----------------------------------------------------------------------------------

    @cached_property
    def _known(self) -> bool:
        return self.wrong and bool(np.isfinite(self.a).all() and np.isfinite(self.g).all() and self.g.any())

    @cached_property
    def _predicted(self) -> bool:
        return self._known and bool(self.a.any())

    @cached_property
    def _total(self) -> Vector | None:
        """s, where predictions are made of it."""
        total = self.mine.total
        return total if self._predicted and total is not None and np.isfinite(total).all() else None

    @cached_property
    def _usual_total(self) -> Vector:
        return self.g if self.theirs.total is None else self.theirs.total

    def times(self, factor: float) -> float:
        """a from g times a factor."""
        return distance(self.a, factor * self.g) if self._predicted else math.inf

    def sum_times(self, factor: float) -> float:
        """s times a factor from the reference's gradient."""
        return math.inf if self._total is None else distance(factor * self._total, self.theirs.unclipped)

    @cached_property
    def line(self) -> float:
        """a from a positive multiple of g."""
        return off_line(self.a, self.g) if self._predicted else math.inf

    def along(self, direction: Vector) -> float:
        """a - g from a multiple of something that has an entry for each parameter."""
        return off_line(self.a - self.g, direction) if self._predicted and self.a.size >= FEWEST else math.inf

    def added_along(self, direction: Vector) -> float:
        """What a holds beside what autograd gave, from a multiple of it: added by hooks, or to the sum."""
        bare = _bare(self.mine) if self._predicted else np.zeros(0)
        added = bare.shape == self.a.shape and distance(self.a, bare) > self.gate
        return off_line(self.a - bare, direction) if added else math.inf

    @property
    def sum_is_known(self) -> bool:
        """Whether predictions are made of s, which may be zero."""
        return self._total is not None

    @cached_property
    def own_sum(self) -> float:
        """a from s."""
        return math.inf if self._total is None else distance(self.a, self._total)

    @cached_property
    def sum_line(self) -> float:
        """a from a positive multiple of s."""
        return math.inf if self._total is None else off_line(self.a, self._total)

    @cached_property
    def sums(self) -> float:
        """s from the reference's own."""
        total = self.mine.total if self._known and not self._predicted else self._total
        return math.inf if total is None or not (self._predicted or total.any()) else distance(total, self._usual_total)

    @cached_property
    def sums_line(self) -> float:
        """s from a positive multiple of the reference's own."""
        return math.inf if self._total is None else off_line(self._total, self._usual_total)

    @cached_property
    def scaled_sum(self) -> float:
        """s from g, up to a factor of the number of micro-batches."""
        n, k = self.accumulation_steps, self.backwards or 1
        return min(map(self.sum_times, (1.0, 1 / n, 1 / k, float(n))))

    @cached_property
    def stale(self) -> float:
        """a from s with the gradient of the step before, or a multiple of it where the reference takes its own sum alone."""
        if self._total is None or self.before is None:
            return math.inf
        least = LEFT_OVER * self.gate * norm(self.g)
        left = [v for v in (self.before.gradient, self.before.unclipped) if v.shape == self.a.shape and norm(v) > least]
        alone = distance(self.g, self._usual_total) <= self.gate
        added = [v * (proportion(self.a - self._total, v)[0] if alone else 1.0) for v in left]
        return min((distance(self.a, v + self._total) for v in added if norm(v) > least), default=math.inf)

    @cached_property
    def clipped_then_divided(self) -> float:
        """How far what was done after clipping, beside what is done there at N=1, is from making up for the gradient's scale."""
        lefts = [step.gradient if step.clip is None else step.clip.left for step in (self.mine, self.theirs)]
        after, usual = (self._factor(step.gradient, left) for step, left in zip((self.mine, self.theirs), lefts, strict=True))
        return finite(abs(after / usual * self.raw.scale - 1))

    @cached_property
    def since_clear(self) -> float:
        """a from a multiple of what the backwards gave since each tensor's gradient was cleared."""
        if self._known and not self._predicted:  # the step took zeros
            return 0.0 if self.mine.total is not None and self.mine.total.any() else math.inf
        if not self.given_parts or not (any(b.emptied for b in self.mine.backwards) or emptied_at_last(self.mine, self.a)):
            return math.inf
        return off_line(self.a, since_clear(self.mine, self.a))

    @cached_property
    def without_foreign(self) -> float:
        """s without the backwards that reached other optimizers as well from g."""
        groups = {b.reached for b in self.mine.backwards}
        if not self.given_parts or len(groups) < 2:
            return math.inf
        parts = (given_by([b for b in self.mine.backwards if b.reached == own]) for own in groups)
        return min((distance(part, self.g) for part in parts if part is not None), default=math.inf)

    @cached_property
    def clamped_parts(self) -> float:
        """a from the sum of what the backwards gave, each clamped to some value."""
        known = self.given_parts and self.own_sum > self.gate and self.a.size >= FEWEST
        return clamped_parts(self.a, self.given_parts) if known else math.inf

    @cached_property
    def clips_sums(self) -> bool:
        """Whether a is what is left where the sum so far is brought to one norm after each backward, where it is longer."""
        weights, so_far, clipped, others = self.taken.weights, np.zeros_like(self.a), list[float](), [0.0]
        if not self.taken.residual <= self.gate or not min(weights) > self.taken.rounding or self.own_sum <= self.gate:
            return False
        for part, (weight, after) in zip(self.given_parts, pairwise((*weights, 1.0)), strict=True):
            so_far = (so_far + part) * (weight / after)
            (clipped if weight < after * (1 - SAME_NORM) else others).append(norm(so_far))
            if weight > after * (1 + SAME_NORM):
                return False
        return bool(clipped) and max(clipped + others) <= min(clipped) * (1 + SAME_NORM)

    @property
    def clipped_alone(self) -> float:
        """a from the sum of what makes up g of what the micro-batches give on their own, each brought to at most one norm."""
        right = self.of_alone[1]
        parts = [w * own for w, own in zip(right.weights, self.probe.alone, strict=False)]
        return clipped_parts(self.a, parts) if right.residual <= self.gate and self.a.size >= FEWEST else math.inf

    @cached_property
    def clipped_parts(self) -> float:
        """a from the sum of what the backwards gave, each brought to at most one norm: as a whole, or tensor by tensor."""
        known = self.given_parts and self.own_sum > self.gate and self.a.size >= FEWEST
        return min(map(self._clipped_to_norms, ([slice(None)], [*slices(self.mine).values()]))) if known else math.inf

    def _clipped_to_norms(self, tensors: Sequence[slice]) -> float:
        """Of what is no multiple of its sum; infinite where all is one."""
        size, left = norm(self.a), list[float]()
        for own in tensors:
            a, parts = self.a[own], [part[own] for part in self.given_parts]
            share = norm(a) / size
            if a.any() and off_line(a, np.sum(parts, axis=0)) * share > self.gate:
                left.append(clipped_parts(a, parts) * share)
        return math.hypot(*left) if left else math.inf

    @cached_property
    def given_parts(self) -> list[Vector]:
        """What each forward of the window gave; empty where it was not kept, or gradients are equal."""
        return [] if self._total is None else by_forward(giving(self.mine), self.gate)

    @cached_property
    def parts(self) -> WeightedSum:
        """g on what the backwards gave: the right weights, of what was stepped."""
        times, found = self._times(self.a, self.mine.total), decomposed(self.g, self.given_parts)
        return found._replace(weights=tuple(w / times for w in found.weights))

    @cached_property
    def not_of_the_loss(self) -> tuple[int, ...]:
        """The parts whose right weight is 0, where the others hold as many rows as the reference gradient is of."""
        parts, given = self.parts, giving(self.mine)
        if len(given) != len(parts.weights) or max(parts.residual, self.sum_line) > self.gate:
            return ()
        if parts.free:  # a part is made up by others: of those that come before the window, by its own
            after = [given_by(given[n:]) for n in range(1, len(given))]
            later = (n for n, part in enumerate(after, 1) if part is not None and distance(part, self.g) <= self.gate)
            zero = tuple(range(next(later, 0)))
        else:
            zero = tuple(place for place, w in enumerate(parts.weights) if abs(w) <= NO_WEIGHT >= parts.rounding)
        held = sum(len(b.rows or ()) for place, b in enumerate(given) if place not in zero)
        return zero if 0 < held == sum(len(b.rows or ()) for b in evaluations(self.theirs)[-1]) else ()

    @cached_property
    def as_added(self) -> float:
        """Times the right weights: what they were before sums were shortened, at N=1 or in the candidate."""
        times, usual = self._times(self.a, self.mine.total), self._times(self.g, self.theirs.total)
        return min(1.0, times) / min(1.0, usual)  # what shortens may be a clip that nobody saw

    def _times(self, a: Vector, total: Vector | None) -> float:
        """By what a window's sum was multiplied (or divided) after it was added up; 1 where `a` is no multiple of it."""
        found = self._factor(a, total)
        return 1.0 if math.isnan(found) else found

    def _factor(self, a: Vector, total: Vector | None) -> float:
        """`a` as a positive multiple of `total`; NaN where it is none."""
        if total is None or total.shape != a.shape or not np.isfinite(total).all() or not total.any():
            return math.nan
        return proportion(a, total)[0] if off_line(a, total) <= self.gate else math.nan

    @cached_property
    def taken(self) -> WeightedSum:
        """a on what the backwards gave: the weights they had in the step."""
        return decomposed(self.a, self.given_parts)

    @property
    def unlike_alone(self) -> tuple[int, ...] | None:
        """The micro-batches that give no multiple of what they give on their own at N=1; None where that is not known."""
        known = len(self.probe.alone) == self.backwards and self._total is not None
        return tuple(place for place, found in enumerate(self.places) if found != place) if known else None

    @property
    def places(self) -> tuple[int | None, ...]:
        """Which micro-batch of the window each one is by what it gives: that in its place, else another; None: none of them."""
        return tuple(self._place(place, b.contribution) for place, b in enumerate(self.mine.backwards))

    def _place(self, own: int, part: Vector | None) -> int | None:
        if part is None or not part.any():
            return None if part is None else own
        order = sorted(enumerate(self.probe.alone), key=lambda one: one[0] != own)
        return next((place for place, alone in order if off_line(part, alone) <= self.gate), None)

    @property
    def own_rows(self) -> bool:
        """Whether each micro-batch gives what it gives on its own, and no weights of them the reference's gradient."""
        return self.unlike_alone == () and not self.counted and self.parts.residual > self.gate

    @property
    def of_alone(self) -> tuple[WeightedSum, WeightedSum]:
        """a and g on what the micro-batches give on their own at N=1."""
        taken, right = (decomposed(v, self.probe.alone) if self.wrong else WeightedSum() for v in (self.a, self.g))
        return taken, right

    @property
    def is_of_alone(self) -> bool:
        """Whether g is a sum of what the micro-batches give on their own at N=1."""
        return self.of_alone[1].residual <= self.gate

    @property
    def counted(self) -> tuple[float, ...]:
        """How often each micro-batch counts in a, where both a and g are sums of what they give on their own; else empty."""
        taken, right = self.of_alone
        known = max(taken.residual, right.residual) <= self.gate and taken.told_apart and self.line > self.gate
        pairs = zip(taken.weights, right.weights, strict=True) if known else ()
        counted = tuple(own / w for own, w in pairs if abs(w) > right.rounding)
        return counted if len(counted) == len(right.weights) else ()

    @cached_property
    def multiples(self) -> tuple[float, float]:
        """What the step took, here and at N=1, as a multiple of what its backwards gave; NaN where it is none."""
        mine, theirs = (self._factor(step.gradient, step.total) for step in (self.mine, self.theirs))
        return mine, theirs

    @cached_property
    def given(self) -> float:
        """||s|| / ||reference's s||."""
        mine, theirs = self.mine.total, self.theirs.total
        size = norm(theirs) if theirs is not None else 0.0
        return norm(mine) / size if mine is not None and size else math.nan

    @cached_property
    def by_rank(self) -> WeightedSum:
        """g as a sum of what every rank's micro-batches gave."""
        known = self.wrong and self.ranks > 1 and self.g.any()
        return by_rank(self.mine, self.a, self.g, self.gate) if known else WeightedSum()

    # -- the micro-batches ------------------------------------------------------------------------------------------------

    @cached_property
    def backwards(self) -> int:
        """K."""
        return len(self.mine.backwards)

    @cached_property
    def rows(self) -> Rows:
        """Whether the window holds the reference's rows."""
        return compare_rows(self.mine, self.theirs)

    @cached_property
    def num_rows(self) -> int:
        """Rows of the window; 0 where they were not seen."""
        return self.mine.num_rows

    @cached_property
    def kept(self) -> bool:
        """Whether the contributions of the window were kept."""
        return all(b.contribution is not None for b in self.mine.backwards)

    @cached_property
    def without_terms(self) -> int:
        """Backwards that gave nothing at all."""
        return sum(b.contribution is not None and not b.contribution.any() for b in self.mine.backwards)

    @property
    def drawn_inside(self) -> bool:
        """Whether random numbers that count were drawn inside a forward."""
        return self.probe.draws_count and any(b.draws for b in self.mine.backwards)

    @property
    def drawn_between(self) -> bool:
        """Or so before every backward but the first."""
        later = self.mine.backwards[1:]
        return self.probe.draws_count and bool(later) and all(b.outside for b in later)

    # -- movements of the parameters between the backwards ----------------------------------------------------------------

    @cached_property
    def moved_apart(self) -> tuple[float, float]:
        """How much further they moved inside the window than in the reference, relative to them; its cosine with them."""
        if not (self.mine.moves and self.theirs.moves):
            return 0.0, math.nan
        moved, usual = (np.sum(step.moves, axis=0) for step in (self.mine, self.theirs))
        return further(moved, usual, self.mine.before, self.keep)

    @property
    def descends(self) -> bool:
        """Whether every movement inside the window goes against what the micro-batch before it gave: an optimizer's own."""
        parts, moves = (
            [b.contribution for b in self.mine.backwards],
            [*(b.moved for b in self.mine.backwards[1:]), self.mine.moved],
        )
        known = [(part, moved) for part, moved in zip(parts, moves, strict=False) if moved is not None]
        return bool(known) and all(part is not None and cosine(moved, part) < -DESCENT for part, moved in known)

    @property
    def moved_as_there(self) -> bool:
        """Whether what they moved inside has brought them to where the reference's are at the step."""
        moved = norm(np.sum(self.mine.moves, axis=0))
        return norm(self.mine.before - self.theirs.before) <= OTHER_MOVE * moved

    @cached_property
    def moved_before(self) -> tuple[float, float]:
        """The same of what something other than the optimizers did since their steps before."""
        a, b = (step.backwards[0].moved if step.backwards else None for step in (self.mine, self.theirs))
        return further(a, b, self.mine.before)

    # -- what happened to `.grad` -----------------------------------------------------------------------------------------

    @property
    def left_over(self) -> bool:
        """Whether it began with gradients, and they were not cleared."""
        starts = {b.start for b in self.mine.backwards}
        return self.before is not None and bool(starts) and starts.isdisjoint(("cleared", "empty", "manual"))

    @property
    def cleared_inside(self) -> int:
        """Backwards before which gradients of the window, or of some tensors, had been cleared."""
        return sum(bool(b.emptied) for b in self.mine.backwards)

    @cached_property
    def cleared_at_last(self) -> tuple[str, ...]:
        """Tensors whose gradients were cleared between the last backward and the step."""
        return emptied_at_last(self.mine, self.a) if self.wrong else ()

    @cached_property
    def norms_inside(self) -> tuple[float, ...]:
        """Norms that gradients had after somebody scaled them inside the window, and at the step where they were then too."""
        inside = tuple(b.rescaled for b in self.mine.backwards if not math.isnan(b.rescaled))
        return (*inside, norm(self.mine.gradient)) if inside else ()

    @cached_property
    def _shrinking(self) -> tuple[int, bool]:
        """How many changes in the window make elements of the gradient smaller, and whether by factors that depend on it.

        By hooks on parameters, or of the sum so far; none where some of these do anything else.
        """
        hooked = [b.hooked for b in self.mine.backwards if b.hooked is not None]
        changed = [change for b in self.mine.backwards for change in b.changed]
        found = shrinking(hooked), shrinking([*changed, *self.mine.changed] if changed else ())
        explained = min(self.scaled_sum, self.sums, self.bare_sums) <= self.gate
        return max(found, key=lambda one: (one[1], one[0])) if explained else (0, False)

    @property
    def shrunk(self) -> int:
        """Times that gradients were made smaller inside the window, where the sum is right without."""
        return self._shrinking[0]

    @property
    def shrunk_by_size(self) -> bool:
        """Whether that was by factors of their own for some elements, and not the same each time: what clipping does."""
        return self._shrinking[1]

    @cached_property
    def bare_sums(self) -> float:
        """What autograd gave before the loop's own hooks on parameters, up to a factor of N, from the reference's."""
        mine, theirs, n = _bare(self.mine), _bare(self.theirs), self.accumulation_steps
        return min(distance(factor * mine, theirs) for factor in (1.0, 1 / n, float(n))) if self._known else math.inf

    # -- clipping and arithmetic ------------------------------------------------------------------------------------------

    @property
    def clipped(self) -> bool:
        """Whether clipping changed the gradients of either arm."""
        return any(c.active for c in (*self.mine.clips, *self.theirs.clips))

    @property
    def clips_scaled(self) -> bool:
        """Whether gradients were clipped with the loss scale still in them."""
        return any(c.active and c.scale > 1 and c.limit < c.scale for c in self.mine.clips)

    @cached_property
    def lost(self) -> float:
        """Share of the reference's elements that are exactly 0 here, above what rounding does."""
        return lost(self.mine, self.theirs, self.nulls)

    @cached_property
    def narrow(self) -> Format | None:
        """The format that every element of a fits in, unlike those of s."""
        wanted = self.g if self.mine.total is None else self.mine.total
        return narrow_format(self.a, wanted, self.mine.counts) if self.wrong else None


def weighed_together(steps: Sequence[StepFacts]) -> list[StepFacts]:
    """Weigh micro-batches over all windows at once, where each has too few elements for it.

    Args:
        steps: What was measured of each pair of steps.

    Returns:
        The same; with the weights that make up all of these windows, if there are such.
    """
    few = [s for s in steps if s.a.size < 2 * len(s.given_parts)]
    if len({(s.only, len(s.given_parts)) for s in few}) != 1:
        return [*steps]
    columns = zip(*([v / norm(s.g) for v in (*s.given_parts, s.a, s.g)] for s in few), strict=True)
    *parts, a, g = map(np.concatenate, columns)
    taken, right = decomposed(a, parts), decomposed(g, parts)
    known = max(taken.residual, right.residual) <= min(s.gate for s in few)
    return [s.but(taken=taken, parts=right) if known and s in few else s for s in steps]


def _bare(step: Step) -> Vector:
    found = given_by([b if b.bare is None else replace(b, contribution=b.bare) for b in step.backwards])
    return np.zeros(0) if found is None else found


def further(moved: Vector | None, usual: Vector | None, before: Vector, keep: np.ndarray | None = None) -> tuple[float, float]:
    """Measure how much further parameters moved than usual, noise left out.

    Args:
        moved: [P] movement; None: they stayed.
        usual: [P] the movement to compare with, or None.
        before: [P] the parameters before.
        keep: [P] which elements count.

    Returns:
        ||moved - usual|| / ||before||, and the cosine of the difference with `before`; 0 and NaN where other weights may have
        made the difference.
    """
    a, b = (np.zeros_like(before) if move is None else move for move in (moved, usual))
    none = 0.0, math.nan
    if a.shape != b.shape or not np.isfinite(a).all() or not np.isfinite(b).all() or not before.any():
        return none
    a, b = (move if keep is None else np.where(keep, move, 0.0) for move in (a, b))
    apart, largest = a - b, max(norm(a), norm(b))
    size, some = norm(apart), apart != 0
    return (size / norm(before), cosine(apart[some], before[some])) if size > OTHER_MOVE * largest else none
