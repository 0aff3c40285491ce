"""From the plain numbers of one optimizer step to causes: every rule is a small pure function.

A rule speaks only when the prediction of its cause reproduces what was seen within the gate, or when it was seen directly
(a call, a counter, a row). Whatever no rule reproduces is `unexplained`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

import numpy as np

from accumulation_harness.audit.compare.floors import is_handed
from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.compare.sums import Format, giving
from accumulation_harness.audit.evidence import Finding, Step, Vector, norms_by
from accumulation_harness.audit.rules.computation import ALONG_WEIGHTS, besides, other_computation
from accumulation_harness.audit.rules.finding import MOVED, UNEQUAL, at, known_weights, listed, told
from accumulation_harness.audit.rules.weights import (
    clipped_aside,
    means_of_some,
    not_of_the_loss,
    sum_rescaled,
    unequal_replicas,
    weighted,
)
from accumulation_harness.compare.linear import CERTAIN, cosine, distance, off_line
from accumulation_harness.judge.cause import Cause

SHRINKING = -0.99  # cosine of a movement with the parameters, below which they shrink
ONE_NORM = 1e-4  # relative; norms that differ by less are one


def _seen_directly(facts: StepFacts) -> Iterator[Finding]:
    """Where gradients agree, movements inside the window and gradients carried over; scaling and clipping where they differ."""
    yield from _moves(facts)
    if facts.clips_scaled:
        yield at(facts, Cause.clip_before_unscale, "seen", "gradients are clipped while the loss scale is still in them")
    if (facts.left_over and facts.gradients_agree) or facts.stale <= facts.gate:
        message = "the gradients of the window before are still there, and the step uses them"
        yield at(facts, Cause.gradients_not_cleared, "seen", message)
    if not facts.gradients_agree:
        yield from _loss_scale(facts)
        yield from _clipped_inside(facts)
        yield from _other_limit(facts)


def _moves(facts: StepFacts) -> Iterator[Finding]:
    """Movements of the parameters besides the optimizer's step, inside the window and since the step before."""
    if facts.gradients_agree and facts.moved_as_there:
        return  # one micro-batch after another moves what the whole batch does at once: rows of a table that it uses
    times, (apart, along) = len(facts.mine.moves), facts.moved_apart
    if times > len(facts.theirs.moves):
        moved = np.sum(facts.mine.moves, axis=0)
        along, names = cosine(moved[moved != 0], facts.mine.before[moved != 0]), _moving(facts.mine, moved)
        shrinking = f"the parameters shrink {times} times in the window, outside the optimizer's step"
        inside = f"{names} move {times} times inside the window"
        if facts.descends and not along < SHRINKING:
            yield at(facts, Cause.step_every_micro_batch, "seen", f"{inside}, each time against the micro-batch's gradient")
        else:
            yield _moved(facts, along, shrinking, inside, times=times)
    elif facts.gradients_agree and apart > MOVED * facts.roundoff:
        shrinking = "the parameters shrink by more than at N=1 inside the window, outside the optimizer's step"
        otherwise = "the parameters are moved inside the window, differently than at N=1"
        yield _moved(facts, along, shrinking, otherwise, apart=apart)
    apart, along = facts.moved_before
    if apart > MOVED * facts.roundoff:
        otherwise = "since the step before, something other than the optimizer has moved the parameters, differently than at N=1"
        yield _moved(facts, along, "between steps something shrinks the parameters by more than at N=1", otherwise, apart=apart)


def _moving(step: Step, moved: Vector) -> str:
    """The parameters that are moved, by name where not all are."""
    sizes = norms_by(step.counts, moved)
    names = [name for (name, _), size in zip(step.tensors, sizes, strict=True) if size > 0]
    return "the parameters" if len(names) == len(sizes) else f"the parameters {', '.join(names[:4])}{', ...' * (len(names) > 4)}"


def _moved(facts: StepFacts, along: float, shrinking: str, otherwise: str, **by: float) -> Finding:
    """A movement, `along` its cosine with the parameters: decay where it is along them, and towards zero."""
    shrinks = along < SHRINKING
    cause = Cause.weight_decay_per_micro_batch if shrinks else Cause.unexplained
    return at(facts, cause, "seen", shrinking if shrinks else otherwise, cosine_with_parameters=along, **by)


def _loss_scale(facts: StepFacts) -> Iterator[Finding]:
    scales, inside, message = {b.scale for b in facts.mine.backwards}, facts.mine.calls_inside.count("unscale"), ""
    if len(scales) > 1:
        message = f"the loss scale changes inside the window ({len(scales)} values)"
    elif inside and facts.sums <= facts.gate:
        message = "gradients are unscaled inside the window: those of earlier micro-batches are divided by the loss scale again"
    if message:
        yield at(facts, Cause.scaler_updated_in_window, "seen", message, times=inside)


def _clipped_inside(facts: StepFacts) -> Iterator[Finding]:
    norms, inside, message = facts.norms_inside, facts.mine.clips_inside if not facts.clips_scaled else 0, ""
    if inside and (facts.scaled_sum <= facts.gate or (not facts.theirs.clips_inside and _not_the_sum(facts))):
        message = f"clipped {inside} times inside the window"
        message += "; unclipped, the sum is the full gradient" if facts.scaled_sum <= facts.gate else ""
    elif len(norms) > 1 and np.ptp(norms) <= ONE_NORM * max(norms) and facts.sums <= facts.gate:
        message = f"the gradients are scaled to a norm of {norms[0]:.4g} inside the window; unscaled, the sum is right"
    if message:
        yield at(facts, Cause.clip_per_micro_batch, "seen", message, norms_after_scaling=norms)


def _not_the_sum(facts: StepFacts) -> bool:
    """Whether the step took something else than the sum of what the backwards gave."""
    return facts.sum_is_known and facts.own_sum > facts.gate


def _other_limit(facts: StepFacts) -> Iterator[Finding]:
    """The gradients before clipping agree."""
    limits = [step.clip.limit for step in (facts.mine, facts.theirs) if step.clip is not None]
    if len({*limits}) == 2 and facts.raw.distance <= facts.gate < facts.consumed.distance:
        message = f"equal gradients, clipped to {limits[0]:.4g} where N=1 clips to {limits[1]:.4g}"
        yield at(facts, Cause.unexplained, "seen", message)


BY_CHANCE = 0.01  # share of all factors that chance makes a ratio of counts
ROUNDED = 1e-12  # relative; how well a factor is known at best
COARSEST = 0.5  # relative; with a wider gate, any prediction fits
LOST = 0.05  # share of elements that are 0 for no other reason than underflow
ROUNDOFF: dict[Format, float] = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 2.0**-5}


def explain_step(facts: StepFacts, *, judge_update: bool = True) -> list[Finding]:
    """What the gradient of this step says; when it agrees, what the update and the state say. Empty when nothing differs.

    Args:
        facts: What was measured of one pair of steps.
        judge_update: Whether update and state are judged, too.

    Returns:
        The findings of this step.
    """
    found = [*_seen_directly(facts)]
    if facts.gradients_agree:
        found = found or [*_underflow(facts)]
        return found or ([*_update(facts)] if judge_update and not facts.agrees else [])
    if not found and facts.gate > COARSEST:
        message = f"the gradients are {facts.raw.distance:.2g} apart, and rounding explains {facts.gate:.2g}: causes look alike"
        return [at(facts, Cause.unexplained, "gradient", message)]
    for rule in RULES:
        found = found or [*rule(facts)]
    found = found + besides(facts, found) if found else other_computation(facts)
    return [_where(facts, one) for one in found] if facts.only else found


def _where(facts: StepFacts, found: Finding) -> Finding:
    """With the tensors that differ, where others agree."""
    names = ", ".join(facts.only[:4]) + (", ..." if len(facts.only) > 4 else "")
    return replace(found, message=f"{found.message}; only {names} differ", evidence={**found.evidence, "tensors": facts.only})


# -- one number: the gradient is a multiple of the reference's ------------------------------------------------------------


class Factor(NamedTuple):
    """A number by which a fault multiplies the gradient."""

    factor: float
    cause: Cause
    message: str


def _replicas(facts: StepFacts) -> Iterator[Finding]:
    for factor in (facts.ranks, 1 / facts.ranks) if facts.ranks not in (1, facts.accumulation_steps) else ():
        if facts.times(factor) <= facts.gate:
            message = f"{factor:g} times the reference's gradient on {facts.ranks} ranks: sum and mean over replicas are mixed up"
            yield at(facts, Cause.replica_scale, "predicted", message, factor=factor, ranks=facts.ranks)


def _scaled(facts: StepFacts) -> Iterator[Finding]:
    """The gradient is a multiple of the reference's, by a number that the window explains."""
    fits = (one for one in _factors(facts) if one.factor not in (0, 1) and facts.times(one.factor) <= facts.gate)
    for factor, cause, message in islice(fits, 1):
        if (facts.clipped_then_divided if facts.clipped else facts.consumed.distance) <= facts.gate:
            cause = Cause.clip_before_unscale
            message = f"the undivided sum is clipped, and divided by {facts.accumulation_steps} afterwards"
        elif facts.consumed.distance <= facts.gate:
            message += "; active clipping hides it in this run"
        if facts.only and not facts.by_itself and cause not in (Cause.short_window_divided_by_n, Cause.clip_before_unscale):
            if _not_the_sum(facts):
                return  # not the backwards gave it
            cause = Cause.auxiliary_loss_scale
            message += " there: a term of the loss that reaches only them is divided otherwise"
        yield at(facts, cause, "predicted", message, factor=factor, fit=facts.times(factor))


def _factors(facts: StepFacts) -> list[Factor]:
    """In the order of `Cause`, except that the short window comes first.

    One micro-batch alone is divided by N either way; whether the loss is divided twice, the full windows tell (`findings`).

    Returns:
        Factors of the gradient, each with its cause and a sentence.
    """
    n, k, rows = facts.accumulation_steps, facts.backwards, facts.mine.num_rows
    added = "times too large: the losses are added, not averaged"
    again = "times too small: something divides again"
    not_divided, twice = Cause.loss_not_divided, Cause.loss_divided_twice
    alone = facts.probe.same_at_one  # the reference is another function
    short, full = Cause.short_window_divided_by_n, facts.candidate.batch_size * n
    also = f" (its {rows} rows, added, would look alike)" if rows == n * n else ""
    squared = f"the gradient is {n} times {n} too large: losses are added, and divided by what is {n} times smaller than at N=1"
    return [
        *([Factor(k / n, short, f"a window of {k} micro-batches is divided by {n}")] if n > 1 and k < n else []),
        *([Factor(rows / full, short, f"a window of {rows} rows is divided by {full}")] if n > 1 and rows < full else []),
        Factor(n, not_divided, f"the gradient is {n} {added}"),
        *([Factor(n * n, Cause.counter_wrong, squared + also)] if n > 1 and not alone else []),
        Factor(k, not_divided, f"the gradient is {k} {added}"),
        Factor(1 / n, twice, f"the gradient is {n} {again}"),
        Factor(1 / (k or 1), twice, f"the gradient is {k} {again}"),
        Factor(rows, not_divided, f"the gradient is {rows} times too large: rows are added, not averaged"),
        Factor(1 / (rows or 1), twice, "the gradient is divided by the number of rows again"),
    ]


def _miscounted(facts: StepFacts) -> Iterator[Finding]:
    """A multiple of the independent reference at every N, N=1 as well: divided by another number of loss terms."""
    alone = facts.accumulation_steps == 1 or facts.probe.same_at_one
    if alone and not facts.only and facts.line <= facts.gate:
        message = f"the gradient is the reference's times {facts.raw.scale:.6g}: another number of loss terms is counted"
        yield at(facts, Cause.counter_wrong, "predicted", message)


# -- a part of the window, or something that is none of it ------------------------------------------------------------------


def _foreign(facts: StepFacts) -> Iterator[Finding]:
    """Gradients of a loss that is not this optimizer's."""
    message = ""
    if facts.without_foreign <= facts.gate:
        message = "another optimizer's loss has left gradients in the window; without its backward passes the sum is right"
    elif [b.start for b in facts.mine.backwards[:1]] == ["changed"] and facts.sum_times(1.0) <= facts.gate:
        message = "the window begins with gradients that no backward of its own has left; without them the sum is right"
    if message:
        yield at(facts, Cause.foreign_gradients, "predicted", message)
    else:
        yield from not_of_the_loss(facts)


def _last_only(facts: StepFacts) -> Iterator[Finding]:
    """Gradients were cleared, and the step takes what came after."""
    inside, at_last, fit = facts.cleared_inside, facts.cleared_at_last, facts.since_clear
    kept_aside = "zero_grad" in facts.mine.calls_after and not at_last  # the sum is one of the loop's own, beside `.grad`
    if not (inside or at_last) or kept_aside or not fit <= facts.gate:
        return
    cause = Cause.gradients_cleared_in_window
    message = f"gradients are cleared {inside} times inside the window: only what came after counts"
    if "load" in facts.mine.calls_inside:
        cause = Cause.resume_in_window
        message = "a checkpoint is loaded inside the window, and the gradients that the window had so far are lost"
    elif at_last:
        message = f"gradients are cleared between the last backward and the step ({', '.join(at_last[:4])})"
    yield at(facts, cause, "predicted", message, cleared_inside=inside, cleared_before_the_step=at_last, fit=fit)


def _lost(facts: StepFacts) -> Iterator[Finding]:
    """Some of the micro-batches reach the step, as they are or in one proportion, and not the sum of them all."""
    weights = facts.taken.weights
    given = [(w, part) for w, part in zip(weights, facts.given_parts, strict=False) if part.any()]
    kept = [part for w, part in given if w > UNEQUAL * max(weights)]
    fit = off_line(facts.a, np.sum(kept, axis=0)) if 0 < len(kept) < len(given) else math.inf
    if fit <= facts.gate < facts.own_sum:
        message = f"not every micro-batch of the window reaches the step: {told(weights)}"
        cause = (
            Cause.sum_rescaled_in_window if facts.norms_inside else Cause.micro_batches_lost
        )  # it was seen to be made so small
        yield at(facts, cause, "predicted", message, counted=weights, fit=fit)


def _added_again(facts: StepFacts) -> Iterator[Finding]:
    """All micro-batches reach the step, and some of them several times."""
    weights, whole = facts.taken.weights, tuple(map(round, facts.taken.weights))
    again = facts.sums <= facts.gate < facts.own_sum and known_weights(facts, facts.taken) and min(whole) == 1 < max(whole)
    if again and max(abs(w - n) for w, n in zip(weights, whole, strict=True)) <= UNEQUAL:
        message = f"what micro-batches give is added more than once: {told(weights)}"
        yield at(facts, Cause.samples_repeated, "predicted", message, counted=weights)


def _same_again(facts: StepFacts) -> Iterator[Finding]:
    """Micro-batches gave one gradient, number by number, and no weights of them make up the right one."""
    parts = [b.contribution for b in giving(facts.mine) if b.contribution is not None]
    alike = [[j for j, other in enumerate(parts) if distance(other, part) <= facts.roundoff] for part in parts]
    most = max(alike, key=len, default=[])
    if len(most) > 1 and facts.parts.residual > facts.gate and not facts.num_rows:
        message = f"micro-batches {listed(tuple(k + 1.0 for k in most))} give one gradient, number by number: the same samples"
        yield at(facts, Cause.samples_repeated, "predicted", message)


def _regulariser(facts: StepFacts) -> Iterator[Finding]:
    """The difference is a multiple of the parameters, or of their signs: a penalty on them."""
    known = max(facts.gate / max(facts.raw.distance, facts.gate), facts.gate)  # a difference is known no better than its parts
    weights = facts.mine.before
    for direction, what in ((weights, "the parameters"), (np.sign(weights), "the signs of the parameters")):
        if facts.kept and (fit := facts.along(direction)) <= known:
            cause, message = Cause.auxiliary_loss_scale, "a penalty is not divided over the micro-batches"
            if facts.added_along(direction) <= known:  # no backward gave it
                cause, message = Cause.weight_decay_per_micro_batch, "it is added to what the backwards gave more often"
            yield at(facts, cause, "predicted", f"the gradients differ by a multiple of {what}: {message}", fit=fit)


def _other_count(facts: StepFacts) -> Iterator[Finding]:
    """A multiple of the reference by a ratio of small whole numbers: divided by another number of loss terms."""
    known = min(facts.gate, CERTAIN * max(facts.line, facts.roundoff))  # what is off the line is rounding
    ratio = _ratio(facts.raw.scale, known) if facts.line <= facts.gate and not facts.only else None
    if ratio is not None and ratio != 1:
        message = f"the gradient is the reference's times {ratio}: it is divided by another number of loss terms than at N=1"
        yield at(facts, Cause.counter_wrong, "predicted", message, ratio=str(ratio))


def _ratio(factor: float, known: float) -> Fraction | None:
    """The fraction that a factor, known so well, is; with a denominator so small that chance finds one for 1 in 100 factors.

    About 0.3 q^2 fractions per unit have denominators up to q.

    Returns:
        The fraction; None where no such fraction is near.
    """
    most = int(math.sqrt(BY_CHANCE / (0.6 * max(factor, 1.0) * max(known, ROUNDED))))
    ratio = Fraction(factor).limit_denominator(most) if most and math.isfinite(factor) else None
    return ratio if ratio and abs(factor / float(ratio) - 1) <= known else None


# -- rounding -------------------------------------------------------------------------------------------------------------


def _rounded(facts: StepFacts) -> Iterator[Finding]:
    """The sum is right, and the step takes it rounded to 16 bits."""
    narrow = facts.narrow if min(facts.sum_times(1.0), facts.sums) <= facts.gate else None
    if narrow is not None and facts.own_sum <= ROUNDOFF[narrow] * (facts.backwards + 1):
        message = f"the accumulated gradient is held in {narrow}: all its elements fit in it"
        yield at(facts, Cause.low_precision_accumulator, "predicted", message, format=narrow)


def _underflow(facts: StepFacts) -> Iterator[Finding]:
    """Elements are 0 in float16 that are not at N=1."""
    if facts.candidate.float16 and (lost := facts.lost) > LOST:
        message = (
            f"{lost:.0%} of the gradient's elements are exactly 0 in float16, and are not at N=1: the smaller loss underflows"
        )
        yield at(facts, Cause.underflow_from_division, "seen", message, share_of_elements_lost=lost)


# -- the update -----------------------------------------------------------------------------------------------------------


def _update(facts: StepFacts) -> Iterator[Finding]:
    """Equal gradients, and the step made something else of them."""
    update = facts.update
    cause, message = Cause.unexplained, f"equal gradients{'' if is_handed(facts.mine) else ' and state'}, but another update"
    if update.distance > update.gate and update.along_weights <= ALONG_WEIGHTS:
        cause = Cause.weight_decay_per_micro_batch
        message = "equal gradients, but the parameters shrink by more: weight decay is applied more often"
    elif update.state_distance > update.state_gate:
        cause = Cause.optimizer_state_per_micro_batch
        message = "equal gradients, but the optimizer's state advanced differently"
    elif update.only or facts.goes:
        message += f" of {', '.join(update.only[:4])}" if update.only else ""
        message += f", {facts.goes:.4g} times that of N=1: as another learning rate makes it" if facts.goes else ""
    yield at(
        facts,
        cause,
        "update",
        message,
        update_distance=update.distance,
        update_gate=update.gate,
        outside_the_direction_of_the_parameters=update.along_weights,
        state_distance=update.state_distance,
        state_gate=update.state_gate,
    )


# By strength of evidence, the first that speaks: first what was counted or seen and leaves no number free (ranks, the optimizers
# that a backward reached, clearing), then one number that the window gives, then several fitted weights, last one fitted number.
# The order of `Cause` settles predictions of equal strength (`_factors`). Between rules it would be wrong: `replica_scale` stands
# late in it, and the number of ranks is known exactly; `mean_of_means` stands early, and has a free weight per micro-batch.
RULES = (
    _replicas,
    unequal_replicas,
    _foreign,
    _last_only,
    means_of_some,
    _scaled,
    _rounded,
    sum_rescaled,
    weighted,
    _lost,
    _added_again,
    _same_again,
    clipped_aside,
    _underflow,
    _regulariser,
    _miscounted,
    _other_count,
)
