"""Gradients that no weights of the micro-batches explain: their computations differ, or several things do at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from accumulation_harness.audit.compare.floors import COARSE_GATE, is_handed, stands_in
from accumulation_harness.audit.compare.probes import OneTerm, RowFacts
from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.rules.finding import (
    CONDITION_LIMIT,
    SAME_FACTOR,
    UNEQUAL,
    at,
    equal,
    known_weights,
    listed,
    made_of,
    other_factors,
    same_factor,
    same_row,
    told,
)
from accumulation_harness.audit.rules.weights import own_means
from accumulation_harness.compare.linear import WeightedSum, norm, proportion
from accumulation_harness.judge.cause import Cause

ALONG_WEIGHTS = 0.05  # share of a difference of updates outside the direction of the parameters, below which it is a shrinking
ALMOST = 0.01  # of a difference, which is left where a cause explains the rest of it
OF_THE_SUM = (  # what happens to gradients after a backward has given them
    Cause.gradients_cleared_in_window,
    Cause.micro_batches_lost,
    Cause.gradients_not_cleared,
    Cause.clip_per_micro_batch,
    Cause.sum_rescaled_in_window,
)
LEFT = "another first micro-batch changes what the later ones give: something is kept from one to the next"
BESIDE = 0.1  # of a difference, which a second cause may make up beside a factor of the whole gradient
SMALLEST = 1e-300  # what nothing is divided by
CLEAR = 10.0  # gates; a difference without a prediction of its own is not named below


def other_computation(facts: StepFacts) -> list[Finding]:
    """What terms, rows, layers and extra runs say of the difference; `unexplained` where they say nothing. Never empty.

    Args:
        facts: What was measured of one pair of steps.

    Returns:
        At least one finding.
    """
    if found := [*_by_term(facts)]:
        return found
    for rule in RULES:
        if found := [*rule(facts)]:
            return found if not found[0].is_named else [*found, *_whole_beside(facts)]
    message, counted = _without_a_name(facts)
    return [at(facts, Cause.unexplained, "gradient", message, counted=counted)]


def _whole_beside(facts: StepFacts) -> Iterator[Finding]:
    """A factor of the whole gradient beside a cause that changes it a little: a tenth of the difference at most."""
    n = facts.accumulation_steps
    for factor, cause in ((n, Cause.loss_not_divided), (1 / n, Cause.loss_divided_twice)):
        if n > 1 and not facts.only and facts.times(factor) <= BESIDE * min(1.0, facts.raw.distance):
            message = f"besides, the gradient as a whole is {facts.raw.scale:.4g} times what it should be"
            yield at(facts, cause, "predicted", message, factor=factor, left=facts.times(factor))


def _without_a_name(facts: StepFacts) -> tuple[str, tuple[float, ...]]:
    """What is known of the difference, and how often micro-batches count, where that is it."""
    if facts.line <= facts.gate:
        said = f"the gradient is the right one times {facts.raw.scale:.6g}, a number that neither N nor the rows explain"
        return said, (facts.raw.scale,)
    if len(facts.parts.weights) > 1 and made_of(facts, facts.parts) and not facts.parts.free:
        right = facts.parts.weights
        counted = tuple(1 / w for w in right if abs(w) > UNEQUAL)
        said = told(counted) if len(counted) == len(right) else f"right weights: {listed(right)}"
        return f"micro-batches count differently than at N=1, and not by their numbers of loss terms: {said}", counted
    if counted := facts.counted:
        return f"micro-batches count differently than on their own at N=1: {told(counted)}", counted
    return _not_weighed(facts), ()


def _not_weighed(facts: StepFacts) -> str:
    if stands_in(facts.mine):
        return "the weights move differently than at N=1; gradients and contributions, which show how, were not handed over"
    if facts.gate < facts.parts.residual <= ALMOST * facts.raw.distance and facts.parts.condition <= CONDITION_LIMIT:
        return (
            f"weights of the micro-batches ({listed(facts.parts.weights)}) give the right gradient "
            f"but for {facts.parts.residual:.2g}, where rounding explains {facts.gate:.2g}"
        )
    rows = facts.probe.by_row
    if rows is not None and rows.outputs <= same_row(facts) < rows.residual and _undisturbed(facts):
        return (
            "the model gives the same rows the same outputs, and the loss has other gradients by them: it uses statistics of "
            "the micro-batch, or other targets"
        )
    if 0 < facts.without_terms < facts.backwards:
        seen = f"{facts.without_terms} of {facts.backwards} backwards give nothing" + (" there" if facts.only else "")
        return f"the gradients differ, and {seen}: what they should give is not known"
    other = facts.unlike_alone or () if is_handed(facts.mine) else ()
    if 0 < len(other) < facts.backwards or (other and facts.is_of_alone):
        return (
            f"micro-batches {', '.join(str(place + 1) for place in other)} of {facts.backwards} give something else than the "
            "rows in their places do on their own at N=1: they hold other rows or random numbers, what was computed before has "
            "an influence, or terms of the loss count differently"
        )
    if len(facts.parts.weights) > 1 and facts.parts.residual > facts.gate and facts.parts.condition <= CONDITION_LIMIT:
        return (
            "no weights of the micro-batches give the gradient of N=1: what is computed of a row depends on random numbers, on "
            "the rows beside it, or on what was computed before, or terms of the loss count otherwise"
        )
    return "the gradients differ, and no known cause reproduces how"


def besides(facts: StepFacts, found: Sequence[Finding]) -> list[Finding]:
    """Say what else is wrong where the step took less (or more) than its backwards gave.

    Called where what the backwards gave is no multiple of the right gradient. A factor alone is not reported: a loop may take
    it out later.

    Args:
        facts: The step.
        found: What has been found of it.

    Returns:
        The further findings.
    """
    off = facts.gate < min(facts.sums_line, facts.bare_sums, facts.own_sum) < math.inf
    if not off or _moved_inside(facts) or not any(one.cause in OF_THE_SUM for one in found) or facts.rows == "different":
        return []
    means = own_means(facts) if known_weights(facts, facts.parts) and not other_factors(facts) else []
    means = [one for one in means if one.cause is Cause.mean_of_means]
    return means or other_computation(facts)


# -- terms of the loss ------------------------------------------------------------------------------------------------


def _by_term(facts: StepFacts) -> Iterator[Finding]:
    """Terms of the loss one by one: some agree, hence the forwards do, and each of the others is wrong in a way of its own."""
    if facts.probe.by_term is None:
        return
    seen, each = facts.probe.by_term.parts, facts.probe.by_term.each
    off = [
        (f"term {place + 1} of {len(each)} of the loss", term) for place, term in enumerate(each) if term.distance > facts.gate
    ]
    if _is_weighted(facts, seen):  # the reference gradient is a sum of the terms
        # one backward for the whole window, whose loss has a term for every forward: these are its micro-batches
        of_forwards = facts.backwards == 1 and facts.theirs.forwards < facts.mine.forwards == len(seen.weights)
        if of_forwards and (found := own_means(facts.but(parts=seen, as_added=1.0, backwards=facts.mine.forwards))):
            yield from found
            return
        others = [place for place, weight in enumerate(seen.weights) if abs(weight - 1) > UNEQUAL]
        of_some = any(_has_some(one) and _is_mean(facts, one, 1) for one in each)
        if 0 < len(others) < len(seen.weights) and not of_some:
            yield _one_term(facts, seen, others)
            return
    if off and facts.rows != "different":
        yield from _wrong_terms(facts, off) if len(off) < len(each) else _all_wrong(facts, off)


def _is_weighted(facts: StepFacts, parts: WeightedSum) -> bool:
    """Whether a sum of the parts with positive weights makes up what it should."""
    return made_of(facts, parts) and min(parts.weights) > 0


def _one_term(facts: StepFacts, seen: WeightedSum, off: Sequence[int]) -> Finding:
    """Some of the terms that the reference gradient is a sum of count otherwise than the rest."""
    message = "a term of the loss is not divided like the rest: " + ", ".join(
        f"term {place + 1} of {len(seen.weights)} counts {1 / seen.weights[place]:.4g} times" for place in off
    )
    return at(facts, Cause.auxiliary_loss_scale, "predicted", message, right_weights_of_terms=seen.weights)


def _all_wrong(facts: StepFacts, off: Sequence[tuple[str, OneTerm]]) -> Iterator[Finding]:
    """No term agrees, and the micro-batches' own terms make up each of them, with weights of its own."""
    if not all(_is_weighted(facts, term.parts) for _, term in off):
        return
    n, found = facts.accumulation_steps, [*_wrong_terms(facts, off)]
    if all(_is_mean(facts, term, n) for _, term in off):
        message = f"every term of the loss counts {n} times: the losses are added, not averaged"
        yield at(facts, Cause.loss_not_divided, "predicted", message)
        found = [one for one in found if one.cause is not Cause.auxiliary_loss_scale]
    yield from found


def _wrong_terms(facts: StepFacts, off: Sequence[tuple[str, OneTerm]]) -> Iterator[Finding]:
    for which, term in off:
        evidence = {"term": which, "right_weights_of_term": term.parts.weights, "scale_of_term": term.scale}
        for cause, message in _of_term(facts, term, which):
            yield at(facts, cause, "gradient" if cause is Cause.unexplained else "predicted", message, **evidence)


def _of_term(facts: StepFacts, term: OneTerm, which: str) -> Iterator[tuple[Cause, str]]:
    """What is wrong with one term: the weights of its micro-batches, those of its rows, or what it depends on."""
    parts, rows, n = term.parts, term.by_row, facts.accumulation_steps
    undivided = Cause.auxiliary_loss_scale, f"{which} is not divided like the rest: it counts {term.scale:.4g} times"
    if not parts.weights and term.line <= facts.gate and term.scale:  # of too few elements to weigh its micro-batches
        yield undivided
    elif parts.residual > facts.gate:
        if rows is not None and rows.first <= same_row(facts) and all(abs(f - 1) <= UNEQUAL for f in rows.factors[0]):
            yield Cause.unexplained, f"the rows of the first micro-batch count in {which} as at N=1, and later ones otherwise"
            return
        if rows is not None and _other_weights(facts, rows):
            yield (
                Cause.normaliser_depends_on_split,
                f"the same {rows.what} gets another weight in {which} in another split: "
                "its divisor or baseline is the micro-batch's",
            )
            return
        message = f"{which} depends on which rows share a micro-batch: no weights of the micro-batches give it; the others agree"
        yield Cause.non_separable_loss, message
        if n > 1 and abs(term.coefficient - 1) <= SAME_FACTOR:  # as at N=1: nothing divides it
            yield undivided
    elif _is_weighted(facts, parts):
        fitting = [factor for factor in (1, n) if _is_mean(facts, term, factor)]
        if equal(parts.weights) and not (fitting and _has_some(term)):
            yield undivided
        elif fitting:
            message = f"micro-batches count equally in {which} although they hold unequal numbers of its terms; the others agree"
            yield Cause.mean_of_means, message
            yield from () if fitting[0] == 1 else (undivided,)
        else:
            right = listed(parts.weights)
            message = f"micro-batches count differently in {which}, and not by their numbers of its terms; right weights: {right}"
            yield Cause.non_separable_loss if facts.probe.coupled else Cause.unexplained, message


def _is_mean(facts: StepFacts, term: OneTerm, factor: int) -> bool:
    """Whether each micro-batch is averaged over its own numbers of this term, times a factor: over all, also those without it."""
    return abs(sum(term.parts.weights) / term.micro_batches * factor - 1) <= same_factor(facts)


def _has_some(term: OneTerm) -> bool:
    """Whether some micro-batches have nothing of this term."""
    return 0 < len(term.parts.weights) < term.micro_batches


def _other_weights(facts: StepFacts, rows: RowFacts) -> bool:
    """Whether rows (or tokens) of a term count otherwise: their slopes are multiples, or each is a number of its own.

    A loss of several rows has no slope at all where a row is alone.

    Returns:
        True if they do.
    """
    if rows.residual <= same_row(facts):
        return not (rows.chosen and (rows.tokens or facts.probe.coupled))
    seen = facts.probe.by_row
    return seen is not None and seen.outputs <= same_row(facts) and facts.probe.elementwise and _undisturbed(facts)


# -- rows, layers and extra runs ------------------------------------------------------------------------------------------


def _outside(facts: StepFacts) -> bool:
    """Whether no weights of the micro-batches give the reference gradient."""
    return facts.parts.residual > facts.gate


def _moved_state(facts: StepFacts) -> Iterator[Finding]:
    if facts.probe.agrees_when_held:
        yield from moved_state(facts, "the difference is gone where")


def moved_state(facts: StepFacts, what: str) -> Iterator[Finding]:
    """`what`: how the gradients are once every micro-batch finds the state that moves as the window's first one does.

    Args:
        facts: What was measured of one pair of steps.
        what: How the gradients are then, in words.

    Yields:
        At most one finding.
    """
    held = facts.probe.held
    if _undisturbed(facts):
        moved = ", ".join(f"`{path}`" for path in held[:4]) + (", ..." if len(held) > 4 else "")
        message = f"{what} every micro-batch finds {moved} as the window's first one does: each moves and uses it"
        kept = Cause.memory_bank if facts.probe.is_bank else Cause.stateful_forward
        cause = Cause.ema_per_micro_batch if facts.probe.is_average else kept
        yield at(facts, cause, "gradient", message, held=held)


def _left_behind(facts: StepFacts) -> Iterator[Finding]:
    """By the loss, or by forwards of which no rows are known."""
    if facts.probe.leaves and _outside(facts) and _undisturbed(facts):
        yield at(facts, Cause.stateful_forward, "gradient", LEFT)


def _cached_weights(facts: StepFacts) -> Iterator[Finding]:
    rows = facts.probe.by_row
    as_before = rows is not None and max(rows.outputs, rows.residual) <= same_row(facts)
    if facts.probe.agrees_when_frozen and not as_before and not facts.mine.moves:
        message = "the difference is gone when the weights stay where they are: a forward uses weights from before the last step"
        yield at(facts, Cause.cached_weights_stale, "gradient", message)


def _random_draws(facts: StepFacts) -> Iterator[Finding]:
    known = facts.candidate.dropout_calls or facts.candidate.norm_calls or facts.rows == "different"
    message = ""
    if _outside(facts) and not known:
        message = "random numbers are drawn inside the forward" if facts.drawn_inside else ""
        message = message or ("random numbers are drawn by the loop for every micro-batch" if facts.drawn_between else "")
    if not message and facts.drawn_between and facts.sums <= facts.gate:
        message = "what the micro-batches give adds up; random numbers are drawn after each, and its gradients change"
    if message:
        yield at(facts, Cause.stochastic_layers, "gradient", message)


def _changed_before_step(facts: StepFacts) -> Iterator[Finding]:
    if (
        not min(facts.scaled_sum, facts.sums) <= CLEAR * facts.gate  # the gate of signs, say, is not that of the sum
        or not CLEAR * facts.gate < facts.own_sum < math.inf
        or (facts.sum_line <= CLEAR * facts.gate and not facts.only)
    ):
        return
    message = "what the backwards give adds up to the reference's gradient, and is changed before the optimizer takes it"
    taken, left = facts.taken, facts.taken.residual * min(1.0, facts.raw.scale)  # what rounding leaves goes by the parts
    counted: tuple[float, ...] = ()
    if len(taken.weights) > 1 and made_of(facts, taken._replace(residual=left)):
        message += f": there {told(taken.weights)}"
        counted = taken.weights
    yield at(facts, Cause.unexplained, "gradient", message, distance_from_the_sum=facts.own_sum, counted=counted)


def _coupled_rows(facts: StepFacts) -> Iterator[Finding]:
    apart = _outside(facts) or (facts.probe.of_all and facts.line > facts.gate)
    if not (apart and facts.probe.coupled and _undisturbed(facts)):
        return
    what = "no weights of the micro-batches give the full gradient" if _outside(facts) else "micro-batches count differently"
    message = f"{what}: the loss of a row depends on the outputs of others"
    if facts.probe.mixed:
        message = "what the model computes for a row depends on the other rows of its micro-batch"
    yield at(facts, _coupling(facts), "gradient", message)


def _coupling(facts: StepFacts) -> Cause:
    return Cause.batch_statistics if facts.probe.mixed else Cause.non_separable_loss


def _undisturbed(facts: StepFacts) -> bool:
    """The window holds the reference's rows, no random numbers are drawn in its forwards, and weights stay where they are."""
    return not facts.drawn_inside and facts.rows != "different" and not _moved_inside(facts)


def _moved_inside(facts: StepFacts) -> bool:
    """Whether parameters move between the backwards more often than in the reference: later micro-batches meet other ones."""
    return len(facts.mine.moves) > len(facts.theirs.moves)


def _other_outputs(facts: StepFacts) -> Iterator[Finding]:
    rows, buffers, cause = facts.probe.by_row, facts.buffers, Cause.stateful_forward
    if rows is None or rows.outputs <= same_row(facts) or not _undisturbed(facts):
        return
    if facts.probe.mixed:
        cause, why = Cause.batch_statistics, "each depends on the other rows of its micro-batch"
    elif buffers:
        why = f"its forward updates and uses {', '.join(buffers[:4])}, once per micro-batch"
    elif facts.probe.leaves:
        why = LEFT
    else:
        return
    message = f"the model gives the same rows other outputs: {why}"
    yield at(facts, cause, "gradient", message, outputs_apart=rows.outputs, buffers=buffers)


def _other_factors(facts: StepFacts) -> Iterator[Finding]:
    """The same outputs, and slopes that point alike, but not by one factor in a micro-batch."""
    rows = facts.probe.by_row
    if rows is None or not other_factors(facts):
        return
    if rows.chosen and rows.alike_where_chosen:
        cause = Cause.non_separable_loss
        message = f"some {rows.what}s count in one split and not in another: which ones depends on the rows beside them"
    elif facts.probe.same_at_one or facts.accumulation_steps == 1:
        cause = Cause.mean_of_means
        message = "rows count differently than in the reference, at every N: each is averaged over its own loss terms"
    else:
        cause = Cause.normaliser_depends_on_split
        message = f"the same {rows.what} gets another weight in another split: its divisor or baseline is the micro-batch's"
    yield at(facts, cause, "gradient", message, factors_of_rows=rows.factors)


def _one_by_one(facts: StepFacts) -> Iterator[Finding]:
    """By what each micro-batch gives on its own at N=1."""
    counted, taken = facts.counted, facts.of_alone[0].weights
    counting = tuple(w for w in counted if abs(w) > UNEQUAL)
    if facts.clipped_alone <= facts.gate < facts.line:
        message = "what micro-batches give on their own is clipped or scaled to one norm before it is added"
        yield at(facts, Cause.clip_per_micro_batch, "predicted", message, counted=counted)
    elif counted and min(taken) > 0 and equal(taken):  # means of micro-batches, averaged or added
        parts = WeightedSum(tuple(1 / w for w in counting), 0.0, 1.0)
        yield from own_means(facts.but(parts=parts, backwards=len(counting)))
    elif counting and min(counting) > 0 and equal(counting):
        message = f"not every micro-batch of the window reaches the step: {told(counted)}"
        yield at(facts, Cause.micro_batches_lost, "predicted", message, counted=counted)
    elif facts.own_rows and _undisturbed(facts) and (is_handed(facts.mine) or _first_rows_differ(facts)):
        if is_handed(facts.mine) and facts.raw.distance <= COARSE_GATE:
            return  # an arithmetic that is not known may make it
        message = (
            "each micro-batch gives what it gives on its own, and the whole batch something else: what is computed of a row "
            "depends on the rows beside it "
        )
        inside = "inside the model: a row alone gives nothing to the tensors before that"
        message += inside if facts.probe.mixed else "(pairs, a divisor or baseline of the micro-batch, statistics)"
        yield at(facts, _coupling(facts), "gradient", message)


def _first_rows_differ(facts: StepFacts) -> bool:
    """Whether the first micro-batch's do, and no outputs: it is neither their place that matters nor what forwards have left."""
    rows = facts.probe.by_row
    return rows is not None and rows.outputs <= same_row(facts) < rows.first


def _by_number(facts: StepFacts) -> Iterator[Finding]:
    """With another number of micro-batches it is the same difference, times a number: that of a term that goes by it."""
    if facts.probe.at_other is None or not _outside(facts) or facts.line <= facts.gate:
        return
    other, gradient = facts.probe.at_other
    here, there = facts.a - facts.g, gradient - facts.g
    times, off = proportion(there, here)
    known = 2 * facts.gate * norm(facts.g) / max(min(norm(here), norm(there)), SMALLEST)
    if off <= known <= COARSE_GATE < abs(times - 1):
        what = f"with {other} micro-batches the difference is {times:.4g} times as large"
        message = f"{what}: a term of the loss is not divided like the rest"
        yield at(facts, Cause.auxiliary_loss_scale, "predicted", message, at_other_number=other, times=times)


def _stepped_inside(facts: StepFacts) -> Iterator[Finding]:
    """Another optimizer's step moves what the forwards of one window use."""
    inside, usual = (step.calls_inside.count("other step") for step in (facts.mine, facts.theirs))
    if inside > usual:
        what = f"another optimizer stepped inside this window ({inside} steps, at N=1 {usual})"
        yield at(facts, Cause.unexplained, "gradient", f"{what}: micro-batches meet other weights")


RULES = (
    _stepped_inside,
    _moved_state,
    _cached_weights,
    _random_draws,
    _changed_before_step,
    _coupled_rows,
    _other_outputs,
    _other_factors,
    _left_behind,
    _one_by_one,
    _by_number,
)
