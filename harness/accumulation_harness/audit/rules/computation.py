"""Gradients that no weights of the micro-batches explain: their computations differ, or several things do at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from accumulation_harness.audit.compare.facts import OneTerm, RowFacts
from accumulation_harness.audit.compare.place import Where
from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.rules.finding import (
    CONDITION_LIMIT,
    UNEQUAL,
    at,
    equal,
    known_weights,
    listed,
    other_factors,
    same_factor,
    same_row,
    told,
    weights_of_rows,
)
from accumulation_harness.audit.rules.weights import own_means
from accumulation_harness.compare.linear import WeightedSum
from accumulation_harness.judge.cause import Cause

ALMOST = 0.01  # of a difference, which is left where a cause explains the rest of it
OF_THE_SUM = (  # what happens to gradients after a backward has given them
    Cause.gradients_cleared_in_window,
    Cause.accumulator_overwritten,
    Cause.gradients_not_cleared,
    Cause.clip_per_micro_batch,
    Cause.sum_rescaled_in_window,
)
INSIDE = (Where.forward, Where.recomputation, Where.backward)  # a module: no term of the loss is wrong
ALIKE = 0.5  # cosine above which two gradients point alike
BESIDE = 0.1  # of a difference, which a second cause may make up beside a factor of the whole gradient
CLEAR = 10.0  # gates; a difference without a prediction of its own is not named below


def other_computation(facts: StepFacts) -> list[Finding]:
    """What terms, rows, layers and extra runs say of the difference; `unexplained` where they say nothing. Never empty."""
    if found := _by_term(facts):
        return found
    for rule in RULES:
        if named := rule(facts):
            cause, more, message = named
            found = [at(facts, cause, "gradient", _evidence(facts) | more, message)]
            return found if cause is Cause.unexplained else [*found, *_whole_beside(facts)]
    return [at(facts, Cause.unexplained, "gradient", _evidence(facts), _without_a_name(facts))]


def _whole_beside(facts: StepFacts) -> list[Finding]:
    """A factor of the whole gradient beside a cause that changes it a little: a tenth of the difference at most."""
    n = facts.accumulation_steps
    for factor, cause in ((n, Cause.loss_not_divided), (1 / n, Cause.loss_divided_twice)):
        left = facts.times(factor)
        if n > 1 and not facts.only and left <= BESIDE * min(1.0, facts.raw.distance):
            message = f"besides, the gradient as a whole is {facts.raw.scale:.4g} times what it should be"
            return [at(facts, cause, "predicted", {"factor": factor, "scale": facts.raw.scale, "left": left}, message)]
    return []


def _without_a_name(facts: StepFacts) -> str:
    if facts.line <= facts.gate:
        return f"the gradient is the right one times {facts.raw.scale:.6g}, a number that neither N nor the rows explain"
    known = facts.parts.condition <= CONDITION_LIMIT and not facts.parts.free
    if len(facts.parts.weights) > 1 and facts.parts.residual <= facts.gate and known:
        right = facts.parts.weights
        counted = told(tuple(1 / w for w in right)) if all(abs(w) > UNEQUAL for w in right) else f"right weights: {listed(right)}"
        return f"micro-batches count otherwise than at N=1, and not by their numbers of loss terms: {counted}"
    if facts.gate < facts.parts.residual <= ALMOST * facts.raw.distance and facts.parts.condition <= CONDITION_LIMIT:
        return (
            f"weights of the micro-batches ({listed(facts.parts.weights)}) give the right gradient "
            f"but for {facts.parts.residual:.2g}, where rounding explains {facts.gate:.2g}"
        )
    rows = facts.probe.by_row
    if rows is not None and rows.outputs > same_row(facts) and _undisturbed(facts):
        return "the model gives the same rows other outputs, those of the window's first micro-batch as well"
    if rows is not None and rows.outputs <= same_row(facts) < rows.residual and _undisturbed(facts):
        return (
            "the model gives the same rows the same outputs, and the loss has other slopes there: it uses statistics of the "
            "micro-batch, or other targets"
        )
    if (weights := weights_of_rows(facts)) and _undisturbed(facts):
        return f"rows count otherwise than at N=1, alike in each micro-batch: {told(weights)}"
    if 0 < facts.without_terms < facts.backwards:
        seen = f"{facts.without_terms} of {facts.backwards} backwards give nothing" + (" there" if facts.only else "")
        return f"the gradients differ, and {seen}: what they should give is not known"
    return "the gradients differ, and no known cause reproduces how"


def besides(facts: StepFacts, found: Sequence[Finding]) -> list[Finding]:
    """What else is wrong where the step took less (or more) than its backwards gave: these give no multiple of what they should.

    Nothing is said of a factor, which a loop may take out later.
    """
    off = facts.gate < min(facts.sums_line, facts.bare_sums) < math.inf
    moved = len(facts.moves) > len(facts.reference_moves)  # other weights give other outputs
    if not off or moved or not any(one.cause in OF_THE_SUM for one in found) or facts.rows == "different":
        return []
    means = own_means(facts) if known_weights(facts, facts.parts) and not other_factors(facts) else []
    means = [one for one in means if one.cause is Cause.mean_of_means]
    return means or ([] if _moved_inside(facts) else other_computation(facts))


def _evidence(facts: StepFacts) -> dict[str, Any]:
    return {
        "what": "gradient",
        "distance": facts.raw.distance,
        "gate": facts.gate,
        "scale": facts.raw.scale,
        "cosine": facts.raw.cosine,
        "residual": facts.parts.residual if math.isfinite(facts.parts.residual) else math.nan,
        "weights": facts.parts.weights,
        "condition": facts.parts.condition,
        "backwards": facts.backwards,
        "rows": facts.rows,
    }


# -- terms of the loss ------------------------------------------------------------------------------------------------


def _by_term(facts: StepFacts) -> list[Finding]:
    """Terms of the loss one by one: some agree, hence the forwards do, and each of the others is wrong in a way of its own."""
    facts = facts.but(gate=max(facts.gate, facts.whole_gate))  # terms are measured by the whole gradient
    if found := _by_micro_batch(facts):
        return found
    each = facts.probe.by_term.each if facts.probe.by_term is not None else ()
    term = _one_term(facts)
    if term is not None and not any(_of_some(facts, one) for one in each):
        return [term]
    off = [
        (f"term {place + 1} of {len(each)} of the loss", term) for place, term in enumerate(each) if term.distance > facts.gate
    ]
    if not off or facts.rows == "different":
        return []
    if len(off) < len(each):
        return [one for which, term in off for one in _wrong_term(facts, term, which)]
    return _all_wrong(facts, off)


def _all_wrong(facts: StepFacts, off: Sequence[tuple[str, OneTerm]]) -> list[Finding]:
    """No term agrees, and the micro-batches' own terms make up each of them, with weights of its own."""
    if not all(_is_weighted(facts, term) for _, term in off):
        return []
    found = [one for which, term in off for one in _weighted_term(facts, term, which, _of_term(term, which))]
    n = facts.accumulation_steps
    if not all(abs(_mean_weight(term) * n - 1) <= same_factor(facts) for _, term in off):
        return found
    message = f"every term of the loss counts {n} times: the losses are added, not averaged"
    whole = at(facts, Cause.loss_not_divided, "predicted", {"scale": facts.raw.scale}, message)
    return [whole, *(one for one in found if one.cause is not Cause.auxiliary_loss_scale)]


def _is_weighted(facts: StepFacts, term: OneTerm) -> bool:
    """Whether the reference's term is a sum of those of the micro-batches with positive weights."""
    parts = term.parts
    return parts.residual <= facts.gate and parts.condition <= CONDITION_LIMIT and min(parts.weights) > 0


def _summed_terms(facts: StepFacts) -> WeightedSum | None:
    """The terms of the loss, where the reference gradient is a sum of them with positive weights."""
    if facts.probe.by_term is None:
        return None
    seen = facts.probe.by_term.parts
    known = seen.residual <= facts.gate and seen.condition <= CONDITION_LIMIT and min(seen.weights) > 0
    return seen if known else None


def _by_micro_batch(facts: StepFacts) -> list[Finding]:
    """One backward for the whole window, whose loss has a term for every forward: these are its micro-batches."""
    seen = _summed_terms(facts)
    if seen is None or facts.backwards != 1 or not facts.reference_forwards < facts.forwards == len(seen.weights):
        return []
    return own_means(facts.but(parts=seen, as_added=1.0, backwards=facts.forwards))


def _one_term(facts: StepFacts) -> Finding | None:
    """The reference gradient is a sum of the terms of the loss, one of which counts otherwise than the rest."""
    seen = _summed_terms(facts)
    if seen is None:
        return None
    off = [place for place, weight in enumerate(seen.weights) if abs(weight - 1) > UNEQUAL]
    if not 0 < len(off) < len(seen.weights):
        return None
    evidence = {"right_weights_of_terms": seen.weights, "residual": seen.residual, "distance": facts.raw.distance}
    message = "a term of the loss is not divided like the rest: " + ", ".join(
        f"term {place + 1} of {len(seen.weights)} counts {1 / seen.weights[place]:.4g} times" for place in off
    )
    return at(facts, Cause.auxiliary_loss_scale, "predicted", evidence, message)


def _wrong_term(facts: StepFacts, term: OneTerm, which: str) -> list[Finding]:
    residual, rows, evidence = term.parts.residual, term.by_row, _of_term(term, which)
    if residual <= facts.gate:
        return _weighted_term(facts, term, which, evidence) if _is_weighted(facts, term) else []
    if rows is not None and _other_weights(facts, rows):
        message = (
            f"the same {rows.what} gets another weight in {which} in another split: its divisor or baseline is the micro-batch's"
        )
        more = {"off_rows": rows.residual}
        return [at(facts, Cause.normaliser_depends_on_split, "predicted", evidence | more, message)]
    message = f"{which} depends on which rows share a micro-batch: no weights of the micro-batches give it; the others agree"
    found = [at(facts, Cause.non_separable_loss, "predicted", evidence | {"residual": residual}, message)]
    nearer_to_n = term.scale > math.sqrt(facts.accumulation_steps)  # than to 1
    return [*found, _undivided(facts, term, which, evidence)] if nearer_to_n else found


def _of_term(term: OneTerm, which: str) -> dict[str, Any]:
    return {"term": which, "right_weights": term.parts.weights, "scale_of_term": term.scale, "distance": term.distance}


def _weighted_term(facts: StepFacts, term: OneTerm, which: str, evidence: dict[str, Any]) -> list[Finding]:
    """The micro-batches' own terms, with other weights: those of means, N times these, or others."""
    factors = (1, facts.accumulation_steps)
    if equal(term.parts.weights) and not any(_of_some(facts, term, factor) for factor in factors):
        return [_undivided(facts, term, which, evidence)]
    for factor in factors:
        if abs(_mean_weight(term) * factor - 1) <= same_factor(facts):
            message = f"micro-batches count equally in {which} although they hold unequal numbers of its terms; the others agree"
            found = [at(facts, Cause.mean_of_means, "predicted", evidence, message)]
            return found if factor == 1 else [*found, _undivided(facts, term, which, evidence)]
    right = listed(term.parts.weights)
    message = f"micro-batches count otherwise in {which}, and not by their numbers of its terms; right weights: {right}"
    return [at(facts, Cause.unexplained, "gradient", evidence, message)]


def _undivided(facts: StepFacts, term: OneTerm, which: str, evidence: dict[str, Any]) -> Finding:
    message = f"{which} is not divided like the rest: it counts {term.scale:.4g} times"
    return at(facts, Cause.auxiliary_loss_scale, "predicted", evidence, message)


def _mean_weight(term: OneTerm) -> float:
    """Over all micro-batches, also those without this term: 1 where each is averaged over its own numbers of it."""
    return sum(term.parts.weights) / term.micro_batches


def _of_some(facts: StepFacts, term: OneTerm, factor: int = 1) -> bool:
    """Whether some micro-batches have nothing of this term, and the others count as if they had its share (times a factor)."""
    return 0 < len(term.parts.weights) < term.micro_batches and abs(_mean_weight(term) * factor - 1) <= same_factor(facts)


def _other_weights(facts: StepFacts, rows: RowFacts) -> bool:
    """Whether rows (or tokens) of a term count otherwise: their slopes are multiples, or each is a number of its own.

    A loss of several rows has no slope at all where a row is alone.
    """
    if rows.residual <= same_row(facts):
        return not (rows.chosen and (rows.tokens or facts.probe.coupled))
    seen = facts.probe.by_row
    return seen is not None and seen.outputs <= same_row(facts) and facts.probe.elementwise and _undisturbed(facts)


# -- rows, layers and extra runs: each rule gives a cause, what it adds to the evidence, and a message ------------------

Named = tuple[Cause, dict[str, Any], str]


def _outside(facts: StepFacts) -> bool:
    """Whether no weights of the micro-batches give the reference gradient."""
    return facts.parts.residual > facts.gate


def _moved_state(facts: StepFacts) -> Named | None:
    if not (facts.probe.agrees_when_held and _undisturbed(facts)):
        return None
    return _state(facts, "the difference is gone where")


def moved_state_beside(facts: StepFacts) -> list[Finding]:
    """A state of which the weights of the micro-batches explain all that is left once it is held."""
    if not _undisturbed(facts):
        return []
    cause, more, message = _state(facts, "weights of the micro-batches explain the difference only where")
    return [at(facts, cause, "gradient", _evidence(facts) | more, message)]


def _state(facts: StepFacts, what: str) -> Named:
    held = facts.probe.held
    moved = ", ".join(f"`{path}`" for path in held[:4]) + (", ..." if len(held) > 4 else "")
    message = f"{what} every micro-batch finds {moved} as the window's first one does: each moves and uses it"
    return Cause.memory_bank if facts.probe.is_bank else Cause.stateful_forward, {"held": held}, message


def _cached_weights(facts: StepFacts) -> Named | None:
    rows = facts.probe.by_row
    as_before = rows is not None and max(rows.outputs, rows.residual) <= same_row(facts)
    if not facts.probe.agrees_when_frozen or as_before:
        return None
    message = "the difference is gone when the weights stay where they are: a forward uses weights of before the last step"
    return Cause.cached_weights_stale, {}, message


def _random_draws(facts: StepFacts) -> Named | None:
    known = facts.candidate.dropout_calls or facts.candidate.norm_calls or facts.rows == "different"
    if _outside(facts) and facts.drawn_inside and not known:
        return Cause.stochastic_layers, {}, "random numbers are drawn inside the forward"
    if facts.drawn_between and facts.rows == "same" and _outside(facts) and not known:
        return Cause.stochastic_layers, {}, "random numbers are drawn by the loop for every micro-batch"
    if facts.drawn_between and facts.sums <= facts.gate:
        message = "what the micro-batches give adds up; random numbers are drawn after each, and its gradients change"
        return Cause.stochastic_layers, {}, message
    return None


def _changed_before_step(facts: StepFacts) -> Named | None:
    if (
        not min(facts.scaled_sum, facts.sums) <= CLEAR * facts.gate  # the gate of signs, say, is not that of the sum
        or not CLEAR * facts.gate < facts.own_sum < math.inf
        or (facts.sum_line <= CLEAR * facts.gate and not facts.only)
    ):
        return None
    message = "what the backwards give adds up to the reference's gradient, and is changed before the optimizer takes it"
    taken = facts.taken
    if len(taken.weights) > 1 and taken.condition <= CONDITION_LIMIT and taken.residual <= facts.gate:
        message += f": there {told(taken.weights)}"
    return Cause.unexplained, {"distance_from_the_sum": facts.own_sum}, message


def _coupled_rows(facts: StepFacts) -> Named | None:
    if not (_outside(facts) and facts.probe.coupled and _undisturbed(facts)):
        return None
    if facts.probe.mixed:
        return Cause.batch_statistics, {}, "what modules make of one row depends on the other rows of its micro-batch"
    message = "no weights of the micro-batches give the full gradient: the loss of a row depends on the outputs of others"
    return Cause.non_separable_loss, {}, message


def _undisturbed(facts: StepFacts) -> bool:
    """The window holds the reference's rows, no random numbers are drawn in its forwards, and weights stay where they are."""
    return not facts.drawn_inside and facts.rows != "different" and not _moved_inside(facts)


def _moved_inside(facts: StepFacts) -> bool:
    """Whether parameters move between the backwards more often than in the reference: later micro-batches meet other ones."""
    return len(facts.moves) > len(facts.reference_moves)


def _other_outputs(facts: StepFacts) -> Named | None:
    rows, buffers = facts.probe.by_row, facts.buffers
    if rows is None or rows.outputs <= same_row(facts) or not _undisturbed(facts):
        return None
    what, evidence = "the model gives the same rows other outputs: ", {"outputs_apart": rows.outputs, "buffers": buffers}
    if facts.probe.mixed:
        return Cause.batch_statistics, evidence, what + "each depends on the other rows of its micro-batch"
    if buffers:
        message = f"its forward updates and uses {', '.join(buffers[:4])}, once per micro-batch"
        return Cause.stateful_forward, evidence, what + message
    if rows.outputs_of_first <= same_row(facts):
        message = "not those of the window's first micro-batch: a forward leaves something behind that the next one uses"
        return Cause.stateful_forward, evidence, what + message
    return None


def _other_factors(facts: StepFacts) -> Named | None:
    """The same outputs, and slopes that point alike, but not by one factor in a micro-batch."""
    rows = facts.probe.by_row
    if rows is None or not other_factors(facts):
        return None
    evidence = {"factors_of_rows": rows.factors}
    if rows.chosen and rows.alike_where_chosen:
        message = f"some {rows.what}s count in one split and not in another: which ones depends on the rows beside them"
        return Cause.non_separable_loss, evidence, message
    if facts.probe.same_at_one or facts.accumulation_steps == 1:
        message = "rows count otherwise than in the reference, at every N: each is averaged over its own loss terms"
        return Cause.mean_of_means, evidence, message
    message = f"the same {rows.what} gets another weight in another split: its divisor or baseline is the micro-batch's"
    return Cause.normaliser_depends_on_split, evidence, message


def _some_tensors(facts: StepFacts) -> Named | None:
    """What differs is too large, and points as it should, in some tensors only."""
    rows, seen, place = facts.probe.by_row, facts.raw, facts.probe.place
    if rows is not None and rows.residual > same_row(facts):  # the loss itself is another one
        return None
    has_terms = facts.candidate.summed or any(b.forwards == 0 for b in facts.mine.backwards)  # one differentiated by itself
    if not has_terms or (place is not None and place.where in INSIDE):
        return None
    if not (facts.probe.made and facts.only and seen.distance > CLEAR * facts.gate and seen.cosine > ALIKE and seen.scale > 1):
        return None
    if not _undisturbed(facts) or facts.candidate.norm_calls or facts.candidate.float16:  # which loses what is small
        return None
    return Cause.auxiliary_loss_scale, {}, "a term of the loss that reaches only some tensors is not divided like the rest"


def _stepped_inside(facts: StepFacts) -> Named | None:
    """Another optimizer's step moves what the forwards of one window use."""
    inside, usual = facts.other_steps, facts.reference_other_steps
    if not inside > usual:
        return None
    message = f"another optimizer stepped inside this window ({inside} steps, at N=1 {usual}): micro-batches meet other weights"
    return Cause.unexplained, {"steps_of_others_inside": inside}, message


RULES = (
    _stepped_inside,
    _moved_state,
    _cached_weights,
    _random_draws,
    _changed_before_step,
    _coupled_rows,
    _other_outputs,
    _other_factors,
    _some_tensors,
)
