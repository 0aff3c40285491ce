"""From the plain numbers of one optimizer step to causes: every rule is a small pure function. No torch, no vectors.

A rule speaks only when the prediction of its cause reproduces what was seen within the gate, or when it was seen directly
(a call, a counter, a row). Whatever no rule reproduces is `unexplained`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from harness.audit.compare.facts import OneTerm, RunFacts, StepFacts
from harness.audit.evidence import Finding
from harness.judge.cause import Cause

CONDITION_LIMIT = 1e6  # of the micro-batch gradients; beyond it their weights mean nothing
UNEQUAL = 1e-2  # relative; weights that differ by more are not equal
SAME_ROW = 1e-3  # relative, for a row's output and the direction of its slope
CLEAR = 10.0  # gates; a difference without a prediction of its own is not named below
FEWEST_RATIOS = 3  # of neighbouring weights, below which they fall evenly by chance
LOST = 0.05  # share of elements that are 0 for no other reason than underflow


def finding(facts: RunFacts | StepFacts, step: int | None, cause: str, evidence: Mapping[str, Any], message: str) -> Finding:
    return Finding(facts.accumulation_steps, step, cause, {"optimizer": facts.track, **evidence}, message)


def explain_step(facts: StepFacts, *, judge_update: bool = True) -> list[Finding]:
    """What the gradient of this step says; when it agrees, what the update and the state say."""
    found = _seen_directly(facts)
    if facts.gradients_agree:
        found = found or _underflow(facts)
        return found or (_update(facts) if judge_update else [])
    if found:
        return found
    for rule in RULES:
        found = rule(facts)
        if found:
            return found
    return _other_computation(facts)


def _seen_directly(facts: StepFacts) -> list[Finding]:
    """Faults that need no inference: they were seen happening."""
    found = []
    evidence: dict[str, Any] = {"times": facts.moves_inside, "cosine_with_parameters": facts.move_along_weights}
    if facts.moves_inside > facts.reference_moves_inside and facts.move_along_weights < -0.99:
        message = f"the parameters shrink {facts.moves_inside} times in the window, outside the optimizer's step"
        found.append(finding(facts, facts.step, "weight_decay_per_micro_batch", evidence, message))
    elif facts.moves_inside > facts.reference_moves_inside:
        message = f"the parameters move {facts.moves_inside} times inside the window"
        found.append(finding(facts, facts.step, Cause.unexplained, evidence, message))
    if facts.clips_scaled:
        message = "gradients are clipped while the loss scale is still in them"
        found.append(finding(facts, facts.step, "clip_before_unscale", {"scale": facts.scale}, message))
    if (facts.stale and facts.gradients_agree) or facts.fits.get("stale", math.inf) <= facts.gate:
        message = "the gradients of the window before are still there, and the step uses them"
        found.append(finding(facts, facts.step, "gradients_not_cleared", {"scale": facts.scale}, message))
    if facts.gradients_agree:
        return found
    if facts.loss_scales > 1:
        message = f"the loss scale changes inside the window ({facts.loss_scales} values)"
        found.append(finding(facts, facts.step, "scaler_updated_in_window", {"scale": facts.scale}, message))
    elif facts.unscaled_inside and facts.fits.get("sums", math.inf) <= facts.gate:
        message = "gradients are unscaled inside the window: those of earlier micro-batches are divided by the loss scale again"
        evidence = {"times": facts.unscaled_inside, "scale": facts.scale}
        found.append(finding(facts, facts.step, "scaler_updated_in_window", evidence, message))
    if facts.active_clips_inside and not facts.clips_scaled and _sum_is_right(facts):
        evidence = {"active_clips_inside": facts.active_clips_inside, "scale": facts.scale, "cosine": facts.cosine}
        message = f"clipped {facts.active_clips_inside} times inside the window; unclipped, the sum is the full gradient"
        found.append(finding(facts, facts.step, "clip_per_micro_batch", evidence, message))
    elif _one_norm(facts.rescaled) and facts.fits.get("sums", math.inf) <= facts.gate:
        evidence = {"norms_after_scaling": facts.rescaled, "scale": facts.scale, "cosine": facts.cosine}
        message = f"the gradients are scaled to a norm of {facts.rescaled[0]:.4g} inside the window; unscaled, the sum is right"
        found.append(finding(facts, facts.step, "clip_per_micro_batch", evidence, message))
    return found


def _one_norm(norms: tuple[float, ...]) -> bool:
    """Several times scaled to the same norm: that is clipping, by whatever code."""
    return len(norms) > 1 and max(norms) - min(norms) <= 1e-4 * max(norms)


def _sum_is_right(facts: StepFacts) -> bool:
    """The unclipped contributions add up to the reference gradient, up to a factor of the number of micro-batches."""
    return min(facts.fits.get(f"sum*{name}", math.inf) for name in ("1", "1/N", "1/K", "N")) <= facts.gate


def _last_only(facts: StepFacts) -> list[Finding]:
    fit = facts.fits.get("since_clear", math.inf)
    if not (facts.cleared_inside or facts.cleared_at_last) or not fit <= facts.gate:
        return []
    evidence: dict[str, Any] = {
        "cleared_inside": facts.cleared_inside,
        "cleared_before_the_step": facts.cleared_at_last,
        "micro_batches": facts.backwards,
        "fit": fit,
        "cosine": facts.cosine,
    }
    if facts.cleared_then_filled and not facts.cleared_at_last:
        message = "only the last micro-batch reaches the step, in gradients put back after they had been cleared"
        return [finding(facts, facts.step, "accumulator_overwritten", evidence, message)]
    if facts.loaded_inside:
        message = "a checkpoint is loaded inside the window, and the gradients that the window had so far are lost"
        return [finding(facts, facts.step, "resume_in_window", evidence, message)]
    message = f"gradients are cleared {facts.cleared_inside} times inside the window: only what came after counts"
    if facts.cleared_at_last:
        message = f"gradients are cleared between the last backward and the step ({', '.join(facts.cleared_at_last[:4])})"
    return [finding(facts, facts.step, "gradients_cleared_in_window", evidence, message)]


def _foreign(facts: StepFacts) -> list[Finding]:
    """Gradients of a loss that is not this optimizer's."""
    fit = facts.fits.get("without_foreign", math.inf)
    if fit <= facts.gate:
        message = "another optimizer's loss has left gradients in the window; without its backward passes the sum is right"
        return [finding(facts, facts.step, "foreign_gradients", {"fit": fit, "distance": facts.raw_distance}, message)]
    if facts.found_changed and facts.fits.get("sum*1", math.inf) <= facts.gate:
        message = "the window begins with gradients that no backward of its own has left; without them the sum is right"
        return [finding(facts, facts.step, "foreign_gradients", {"distance": facts.raw_distance}, message)]
    return []


def _underflow(facts: StepFacts) -> list[Finding]:
    if not facts.float16 or facts.lost <= LOST:
        return []
    evidence = {"share_of_elements_lost": facts.lost, "scale": facts.raw_scale, "cosine": facts.raw_cosine}
    message = (
        f"{facts.lost:.0%} of the gradient's elements are exactly 0 in float16, and are not at N=1: the smaller loss underflows"
    )
    return [finding(facts, facts.step, "underflow_from_division", evidence, message)]


def _unequal_replicas(facts: StepFacts) -> list[Finding]:
    """The reference gradient weighs what the ranks gave otherwise than equally."""
    weights = facts.rank_weights
    flat = [w for row in weights for w in row]
    if not flat or facts.rank_residual > facts.gate or facts.rank_condition > CONDITION_LIMIT or min(flat) <= 0:
        return []
    ranks = [sum(column) / len(weights) for column in zip(*weights, strict=True)]
    inside = max(max(column) - min(column) for column in zip(*weights, strict=True)) / max(flat)
    evidence = {"right_weights": weights, "condition": facts.rank_condition, "distance": facts.raw_distance}
    found = []
    if (max(ranks) - min(ranks)) / max(ranks) > UNEQUAL:
        message = "ranks count equally although they hold unequal numbers of loss terms; right weights: " + ", ".join(
            f"{w:.3g}" for w in ranks
        )
        found.append(finding(facts, facts.step, "replica_scale", evidence, message))
    if inside > UNEQUAL:
        message = "the micro-batches of a rank count equally although they hold unequal numbers of loss terms"
        found.append(finding(facts, facts.step, "mean_of_means", evidence, message))
    return found


def _miscounted(facts: StepFacts) -> list[Finding]:
    """A multiple of the independent reference at every N, N=1 as well: divided by another number of loss terms."""
    alone = facts.accumulation_steps == 1 or facts.same_at_one
    if not alone or not facts.fits.get("line", math.inf) <= facts.gate:
        return []
    evidence = {"scale": facts.raw_scale, "cosine": facts.raw_cosine}
    message = f"the gradient is the reference's times {facts.raw_scale:.6g}: another number of loss terms is counted"
    return [finding(facts, facts.step, "counter_wrong", evidence, message)]


def _replicas(facts: StepFacts) -> list[Finding]:
    for name, factor in (("W", facts.ranks), ("1/W", 1 / facts.ranks)):
        fit = facts.fits.get(name, math.inf)
        if facts.ranks > 1 and fit <= facts.gate and (facts.accumulation_steps == 1 or facts.ranks != facts.accumulation_steps):
            evidence = {"scale": facts.raw_scale, "factor": factor, "ranks": facts.ranks, "fit": fit}
            message = f"{factor:g} times the reference's gradient on {facts.ranks} ranks: sum and mean over replicas are mixed up"
            return [finding(facts, facts.step, "replica_scale", evidence, message)]
    return []


def _scaled(facts: StepFacts) -> list[Finding]:
    """The gradient is a multiple of the reference's, by a number that the window explains."""
    n, k = facts.accumulation_steps, facts.backwards
    short = n > 1 and k < n
    for name, factor, cause, why in (
        ("K/N", k / n, "short_window_divided_by_n", f"a window of {k} micro-batches is divided by {n}"),
        ("N", n, "loss_not_divided", f"the gradient is {n} times too large: the losses are added, not averaged"),
        ("K", k, "loss_not_divided", f"the gradient is {k} times too large: the losses are added, not averaged"),
        ("1/N", 1 / n, "loss_divided_twice", f"the gradient is {n} times too small: something divides again"),
        ("1/K", 1 / k if k else 1, "loss_divided_twice", f"the gradient is {k} times too small: something divides again"),
        (
            "R",
            facts.num_rows,
            "loss_not_divided",
            f"the gradient is {facts.num_rows} times too large: rows are added, not averaged",
        ),
        ("1/R", 1 / (facts.num_rows or 1), "loss_divided_twice", "the gradient is divided by the number of rows again"),
    ):
        if factor in (0, 1) or (name == "K/N" and not short):
            continue
        fit = facts.fits.get(name, math.inf)
        if fit <= facts.gate:
            evidence = {"scale": facts.raw_scale, "cosine": facts.raw_cosine, "factor": factor, "fit": fit, "gate": facts.gate}
            if facts.clipped and facts.fits.get("clipped_then_divided", math.inf) <= facts.gate:
                why = f"the undivided sum is clipped, and divided by {n} afterwards"
                return [finding(facts, facts.step, "clip_before_unscale", evidence, why)]
            if facts.distance <= facts.gate:
                why += "; active clipping hides it in this run"
            return [finding(facts, facts.step, cause, evidence, why)]
    return []


def _rounded(facts: StepFacts) -> list[Finding]:
    if facts.low_precision is None:
        return []
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[facts.low_precision] * (facts.backwards + 1)
    right = min(facts.fits.get(name, math.inf) for name in ("sum*1", "sums")) <= facts.gate
    if not right or not facts.fits.get("own_sum", math.inf) <= rounding:
        return []
    evidence = {"format": facts.low_precision, "distance": facts.raw_distance, "gate": facts.gate}
    message = f"the accumulated gradient is held in {facts.low_precision}: all its elements fit in it"
    return [finding(facts, facts.step, "low_precision_accumulator", evidence, message)]


def _weighted(facts: StepFacts) -> list[Finding]:
    """The reference gradient is a sum of the contributions with other weights: the micro-batches themselves are right."""
    if facts.fits.get("line", math.inf) <= facts.gate:
        return []  # a multiple of the right gradient: no micro-batch counts otherwise than another
    usable = len(facts.weights) > 1 and facts.condition <= CONDITION_LIMIT and all(w > 0 for w in facts.weights)
    if (
        not usable
        or not facts.fits.get("span", math.inf) <= facts.gate
        or not facts.fits.get("plain_sum", math.inf) <= facts.gate
    ):
        return []
    weights, n = facts.weights, facts.accumulation_steps
    if one := _one_backward(facts):
        return [one]
    if scaled := _growing(facts):
        return [scaled]
    mean = sum(weights) / len(weights)
    evidence = {"right_weights": weights, "cosine": facts.raw_cosine, "scale": facts.raw_scale, "condition": facts.condition}
    message = "micro-batches count equally although they hold unequal numbers of loss terms; right weights: " + ", ".join(
        f"{w:.3g}" for w in weights
    )
    found = [finding(facts, facts.step, "mean_of_means", evidence, message)]
    short = len(weights) < n
    for factor, cause in (
        (n / len(weights) if short else 0, "short_window_divided_by_n"),
        (1 / n, "loss_not_divided"),
        (n, "loss_divided_twice"),
    ):
        if n > 1 and factor and abs(mean / factor - 1) <= min(max(facts.gate, 1e-3), UNEQUAL):
            message = f"besides, the gradient as a whole is {1 / mean:.4g} times what it should be"
            found.append(finding(facts, facts.step, cause, {"factor": 1 / mean, "right_weights": weights}, message))
    return found


def _growing(facts: StepFacts) -> Finding | None:
    """Each micro-batch counts by one and the same factor more (or less) than the one before: numbers of terms do not do that."""
    ratios = [a / b for a, b in pairwise(facts.weights)]
    if len(ratios) < FEWEST_RATIOS or max(ratios) - min(ratios) > UNEQUAL * max(ratios) or abs(ratios[0] - 1) <= UNEQUAL:
        return None
    evidence = {"right_weights": facts.weights, "factor": ratios[0], "condition": facts.condition}
    message = f"every micro-batch counts {ratios[0]:.4g} times the one before: its loss is scaled by a factor that changes inside"
    return finding(facts, facts.step, "scaler_updated_in_window", evidence, message)


def _one_backward(facts: StepFacts) -> Finding | None:
    """Several backwards per micro-batch, one for each loss: all of one loss count otherwise than those of another."""
    losses = facts.reference_backwards
    if losses < 2 or len(facts.weights) % losses or len(facts.weights) == losses:
        return None
    by_loss = [facts.weights[place::losses] for place in range(losses)]
    if any(max(same) - min(same) > UNEQUAL * max(same) for same in by_loss):
        return None
    means = tuple(sum(same) / len(same) for same in by_loss)
    if max(means) - min(means) <= UNEQUAL * max(means):
        return None
    evidence = {"right_weights_of_losses": means, "condition": facts.condition, "distance": facts.raw_distance}
    message = "the losses of a micro-batch, each with a backward of its own, are not divided alike; right weights: " + ", ".join(
        f"{mean:.3g}" for mean in means
    )
    return finding(facts, facts.step, "auxiliary_loss_scale", evidence, message)


def _overwritten(facts: StepFacts) -> list[Finding]:
    for name, which in (("first", "first"), ("last", "last")):
        fit = facts.fits.get(name, math.inf)
        if facts.backwards > 1 and fit <= facts.gate and _sum_is_right(facts):
            evidence = {"fit": fit, "micro_batches": facts.backwards}
            message = f"only the {which} micro-batch of the window reaches the step"
            return [finding(facts, facts.step, "accumulator_overwritten", evidence, message)]
    return []


def _regulariser(facts: StepFacts) -> list[Finding]:
    for name, what in (("along_weights", "the parameters"), ("along_signs", "the signs of the parameters")):
        fit = facts.fits.get(name, math.inf)
        if fit <= max(facts.gate / max(facts.raw_distance, facts.gate), facts.gate):
            evidence = {"fit": fit, "distance": facts.raw_distance}
            message = f"the gradients differ by a multiple of {what}: a penalty is not divided over the micro-batches"
            return [finding(facts, facts.step, "auxiliary_loss_scale", evidence, message)]
    return []


def _by_term(facts: StepFacts) -> list[Finding]:
    """Terms of the loss one by one: some agree, hence the forwards do, and each of the others is wrong in a way of its own."""
    if term := _one_term(facts):
        return [term]
    each = facts.by_term.each if facts.by_term is not None else ()
    off = [(place, term) for place, term in enumerate(each) if term.distance > facts.gate]
    if not 0 < len(off) < len(each) or facts.rows == "different":
        return []
    return [one for place, term in off for one in _wrong_term(facts, term, f"term {place + 1} of {len(each)} of the loss")]


def _wrong_term(facts: StepFacts, term: OneTerm, which: str) -> list[Finding]:
    weights, n = term.weights, facts.accumulation_steps
    evidence = {"term": which, "right_weights": weights, "scale_of_term": term.scale, "distance": term.distance}
    mean = sum(weights) / len(weights) if weights else math.inf
    found = []
    if term.residual > facts.gate and term.off_rows <= max(SAME_ROW, 30 * facts.roundoff):
        message = f"the same row gets another weight in {which} in another split: its divisor or baseline is the micro-batch's"
        found.append(finding(facts, facts.step, "normaliser_depends_on_split", evidence | {"off_rows": term.off_rows}, message))
        undivided = False
    elif term.residual > facts.gate:
        message = f"{which} depends on which rows share a micro-batch: no weights of the micro-batches give it; the others agree"
        found.append(finding(facts, facts.step, "non_separable_loss", evidence | {"residual": term.residual}, message))
        undivided = term.scale > math.sqrt(n)  # nearer to N than to 1
    elif term.condition > CONDITION_LIMIT or min(weights) <= 0:
        return []
    else:
        if max(weights) - min(weights) > UNEQUAL * max(weights):
            message = f"micro-batches count equally in {which} although they hold unequal numbers of its terms; the others agree"
            found.append(finding(facts, facts.step, "mean_of_means", evidence, message))
        undivided = not found or abs(mean * n - 1) <= max(facts.gate, 1e-3)
    if undivided:
        message = f"{which} is not divided like the rest: it counts {term.scale:.4g} times"
        found.append(finding(facts, facts.step, "auxiliary_loss_scale", evidence, message))
    return found


def _one_term(facts: StepFacts) -> Finding | None:
    """The reference gradient is a sum of the terms of the loss, one of which counts otherwise than the rest."""
    seen = facts.by_term
    if seen is None or seen.residual > facts.gate or seen.condition > CONDITION_LIMIT or min(seen.weights) <= 0:
        return None
    off = [place for place, weight in enumerate(seen.weights) if abs(weight - 1) > UNEQUAL]
    if not 0 < len(off) < len(seen.weights):
        return None
    evidence = {"right_weights_of_terms": seen.weights, "residual": seen.residual, "distance": facts.raw_distance}
    message = "a term of the loss is not divided like the rest: " + ", ".join(
        f"term {place + 1} of {len(seen.weights)} counts {1 / seen.weights[place]:.4g} times" for place in off
    )
    return finding(facts, facts.step, "auxiliary_loss_scale", evidence, message)


def _other_computation(facts: StepFacts) -> list[Finding]:
    """Not a matter of weights: the micro-batch computations themselves differ, or several things at once."""
    evidence: dict[str, Any] = {
        "what": "gradient",
        "distance": facts.raw_distance,
        "gate": facts.gate,
        "scale": facts.raw_scale,
        "cosine": facts.raw_cosine,
        "residual": facts.fits.get("span", math.nan),
        "weights": facts.weights,
        "condition": facts.condition,
        "backwards": facts.backwards,
        "rows": facts.rows,
    }
    outside = facts.fits.get("span", math.inf) > facts.gate
    if found := _by_term(facts):
        return found
    if facts.held:
        message = "the difference is gone when the weights stay where they are: a forward uses weights of before the last step"
        return [finding(facts, facts.step, "cached_weights_stale", evidence, message)]
    if outside and facts.draws and not facts.dropout and not facts.batch_norm and facts.rows != "different":
        return [finding(facts, facts.step, "stochastic_layers", evidence, "random numbers are drawn inside the forward")]
    if facts.drawn_between and facts.fits.get("sums", math.inf) <= facts.gate:
        message = "what the micro-batches give adds up; random numbers are drawn after each, and its gradients change"
        return [finding(facts, facts.step, "stochastic_layers", evidence, message)]
    if outside and facts.coupled and not facts.draws and facts.rows != "different":
        message = "no weights of the micro-batches give the full gradient: the loss of a row depends on the outputs of others"
        return [finding(facts, facts.step, "non_separable_loss", evidence, message)]
    rows = facts.by_row
    alike, unequal = max(SAME_ROW, 30 * facts.roundoff), max(UNEQUAL, 100 * facts.roundoff)
    moved = rows is not None and rows.outputs > alike and not facts.draws and facts.rows != "different"
    if moved and (facts.mixed or facts.buffers):
        evidence |= {"outputs_apart": rows.outputs if rows else None, "buffers": facts.buffers}
        message = "the model gives the same rows other outputs: " + (
            "each depends on the other rows of its micro-batch"
            if facts.mixed
            else f"its forward updates and uses {', '.join(facts.buffers[:4])}, once per micro-batch"
        )
        return [finding(facts, facts.step, "batch_statistics", evidence, message)]
    if rows is not None and rows.outputs <= alike and rows.residual <= alike and rows.spread > unequal:
        evidence |= {"factors_of_rows": rows.factors}
        if facts.same_at_one or facts.accumulation_steps == 1:
            message = "rows count otherwise than in the reference, at every N: each is averaged over its own loss terms"
            return [finding(facts, facts.step, "mean_of_means", evidence, message)]
        message = (
            "the same row gets another weight in another split: what it is divided by, or compared with, is the micro-batch's"
        )
        return [finding(facts, facts.step, "normaliser_depends_on_split", evidence, message)]
    clear = facts.raw_distance > CLEAR * facts.gate
    if facts.probed and clear and facts.partly and not facts.draws and not facts.batch_norm and facts.rows != "different":
        evidence |= {"tensors": facts.partly}
        message = (
            f"only {', '.join(facts.partly[:4])} differ: a term of the loss that reaches only them is not divided like the rest"
        )
        return [finding(facts, facts.step, "auxiliary_loss_scale", evidence, message)]
    message = "the gradients differ, and no known cause reproduces how"
    if facts.fits.get("line", math.inf) <= facts.gate:
        message = f"the gradient is the right one times {facts.raw_scale:.6g}, a number that neither N nor the rows explain"
    return [finding(facts, facts.step, Cause.unexplained, evidence, message)]


def _update(facts: StepFacts) -> list[Finding]:
    """Equal gradients, and the step made something else of them."""
    if facts.agrees:
        return []
    evidence: dict[str, Any] = {
        "what": "update",
        "update_distance": facts.update_distance,
        "update_gate": facts.update_gate,
        "state_distance": facts.state_distance,
        "state_gate": facts.state_gate,
    }
    if facts.update_distance > facts.update_gate and facts.update_along_weights <= 0.05:
        evidence["outside_the_direction_of_the_parameters"] = facts.update_along_weights
        message = "equal gradients, but the parameters shrink by more: weight decay is applied more often"
        return [finding(facts, facts.step, "weight_decay_per_micro_batch", evidence, message)]
    if facts.state_distance > facts.state_gate:
        message = "equal gradients, but the optimizer's state advanced differently"
        return [finding(facts, facts.step, "optimizer_state_per_micro_batch", evidence, message)]
    return [finding(facts, facts.step, Cause.unexplained, evidence, "equal gradients and state, but another update")]


RULES = (
    _replicas,
    _unequal_replicas,
    _foreign,
    _last_only,
    _scaled,
    _rounded,
    _weighted,
    _overwritten,
    _underflow,
    _regulariser,
    _miscounted,
)
