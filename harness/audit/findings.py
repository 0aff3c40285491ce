"""From plain numbers to causes (the names of the catalogue of faults). No torch, no vectors: every rule is a small pure function.

A rule speaks only when the prediction of its cause reproduces what was seen within the gate, or when it was seen directly
(a call, a counter, a row). Whatever no rule reproduces is `unexplained`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.audit.evidence import Finding
from harness.audit.facts import RunFacts, StepFacts

UNEXPLAINED = "unexplained"
CONDITION_LIMIT = 1e6  # of the micro-batch gradients; beyond it their weights mean nothing
SAME_LR = 1e-9  # relative; learning rates are computed, not measured


def explain(run: RunFacts, steps: Sequence[StepFacts]) -> list[Finding]:
    """All findings of one optimizer of one candidate, in the order of the steps; empty when nothing differs."""
    found = _structure(run, steps)
    limit = min((f.optimizer_step for f in found if f.optimizer_step is not None), default=math.inf)
    broken_off = bool(found)
    pure = True  # nothing before this step made state or rate another
    for facts in steps:
        if facts.step >= limit and broken_off:
            break
        pure = pure and _same(run.lrs[facts.step], run.reference_lrs[facts.step])
        said = explain_step(facts, judge_update=pure)
        pure = pure and facts.gradients_agree
        if broken_off and facts.rows == "unknown":  # a misplaced window explains it as well
            said = [finding for finding in said if finding.cause != UNEXPLAINED]
        found += said
        if not facts.backwards and not facts.reference_backwards and not facts.agrees:
            break  # only weights were seen: later steps start from other weights
    if not broken_off:
        found += _schedule(run) + _counters(run) + _shadows(run)
        clean = not found and all(facts.agrees for facts in steps)
        found += _report(run) if clean else []
    return first_of_each(_told_apart(found, run))


def _told_apart(found: list[Finding], run: RunFacts) -> list[Finding]:
    """K/N and 1/N are one number in a window of one micro-batch: the full windows say which of the two divides."""
    whole = [t for t, count in enumerate(run.backwards) if count == run.accumulation_steps]
    full = {f.cause for f in found if f.optimizer_step in whole}
    other = {"short_window_divided_by_n": "loss_divided_twice"}
    one = 1 / run.accumulation_steps
    return [f for f in found if not (f.evidence.get("factor") == one and other.get(f.cause) in full)]


def first_of_each(findings: Sequence[Finding]) -> list[Finding]:
    """One finding per cause and arm, the first, with the steps it was seen at; `unexplained` only after nothing else."""
    kept: dict[tuple[int, str], Finding] = {}
    steps: dict[tuple[int, str], list[int]] = {}
    for finding in findings:
        key = (finding.accumulation_steps, finding.cause)
        kept.setdefault(key, finding)
        seen = [] if finding.optimizer_step is None else finding.evidence.get("steps", [finding.optimizer_step])
        steps[key] = sorted({*steps.get(key, []), *seen})
    for key, finding in kept.items():
        finding.evidence["steps"] = steps[key]
    explained = {key[0] for key, finding in kept.items() if finding.cause != UNEXPLAINED}
    return [f for f in kept.values() if f.cause != UNEXPLAINED or f.accumulation_steps not in explained or _own_kind(f)]


def _own_kind(finding: Finding) -> bool:
    """An unexplained step stays beside explained ones: it is another difference. Updates after a wrong gradient are not."""
    return finding.evidence.get("what") == "gradient"


# -- steps and windows ------------------------------------------------------------------------------------------------


def _structure(run: RunFacts, steps: Sequence[StepFacts]) -> list[Finding]:
    """Windows that are not the reference's; at most one finding, since what follows it cannot be aligned."""
    differs = run.steps != run.reference_steps or "different" in run.windows or any(not facts.gradients_agree for facts in steps)
    if differs and (run.broken_windows or run.reference_broken):
        return [_non_finite(run)]
    if run.idle_steps > run.reference_idle_steps:
        return [_idle(run)]
    if run.steps > run.reference_steps and _one_backward_each(run):
        return [_every_micro_batch(run)]
    first = next((i for i, window in enumerate(run.windows) if window == "different" and not _agree(steps, i)), None)
    if run.steps == run.reference_steps and first is None:
        return []
    place = first if first is not None else min(run.steps, run.reference_steps)
    evidence = {
        "optimizer_steps": run.steps,
        "reference_optimizer_steps": run.reference_steps,
        "backwards_per_step": list(run.backwards),
        "reference_backwards_per_step": list(run.reference_backwards),
        "backwards_after_last_step": run.pending,
        "rows_repeated": sum(run.repeated),
        "rows_never_seen": run.never,
        "rows_unknown_to_reference": run.foreign,
    }
    facts = next((f for f in steps if f.step == place), None)
    if first is not None and run.foreign and facts is not None and facts.outside_draws:
        return [_finding(run, place, "stochastic_layers", evidence, "the rows themselves are drawn at random per micro-batch")]
    if first is not None and run.foreign:
        return [_finding(run, place, UNEXPLAINED, evidence, "the windows hold rows that the reference never saw")]
    if sum(run.repeated):
        return [_finding(run, place, "samples_repeated", evidence, f"{sum(run.repeated)} rows are used more often than at N=1")]
    if first is None and run.steps < run.reference_steps:
        message = f"{run.steps} optimizer steps instead of {run.reference_steps}: the end of the data is left out"
    elif first is None:
        message = f"{run.steps} optimizer steps instead of {run.reference_steps}"
    else:
        message = f"optimizer step {place} takes other rows than at N=1: a window is dropped, cut short or straddles the epoch"
    return [_finding(run, place, "window_misplaced", evidence, message)]


def _agree(steps: Sequence[StepFacts], index: int) -> bool:
    return any(facts.step == index and facts.gradients_agree for facts in steps)


def _one_backward_each(run: RunFacts) -> bool:
    """Every step follows one backward, while the reference's steps are as many times fewer as there are micro-batches."""
    return max(run.backwards, default=0) <= max(run.reference_backwards, default=1) and run.steps >= 1.5 * run.reference_steps


def _every_micro_batch(run: RunFacts) -> Finding:
    evidence = {
        "optimizer_steps": run.steps,
        "reference_optimizer_steps": run.reference_steps,
        "backwards_per_step": list(run.backwards),
    }
    message = f"the optimizer steps after every micro-batch: {run.steps} steps instead of {run.reference_steps}"
    return _finding(run, 0, "step_every_micro_batch", evidence, message)


def _idle(run: RunFacts) -> Finding:
    evidence = {"steps_that_moved_nothing": run.idle_steps, "optimizer_steps": run.steps, "state_steps": list(run.state_steps)}
    message = f"{run.idle_steps} optimizer steps inside windows move no parameter but advance the optimizer's state"
    return _finding(run, 0, "optimizer_state_per_micro_batch", evidence, message)


def _non_finite(run: RunFacts) -> Finding:
    place = run.broken_windows[0] if run.broken_windows else None
    evidence = {
        "windows_with_non_finite_values": list(run.broken_windows),
        "reference_windows_with_non_finite_values": run.reference_broken,
        "optimizer_steps": run.steps,
        "reference_optimizer_steps": run.reference_steps,
        "backwards_per_step": list(run.backwards),
    }
    message = "a micro-batch with non-finite values is left out or passed on by itself; the full batch goes as a whole"
    return _finding(run, place, "non_finite_micro_batch", evidence, message)


# -- one step ---------------------------------------------------------------------------------------------------------


def explain_step(facts: StepFacts, *, judge_update: bool = True) -> list[Finding]:
    """What the gradient of this step says; when it agrees, what the update and the state say."""
    found = _seen_directly(facts)
    if facts.gradients_agree:
        return found or (_update(facts) if judge_update else [])
    if found:
        return found
    for rule in (_replicas, _last_only, _scaled, _rounded, _weighted, _overwritten, _regulariser):
        found = rule(facts)
        if found:
            return found
    return [_other_computation(facts)]


def _seen_directly(facts: StepFacts) -> list[Finding]:
    """Faults that need no inference: they were seen happening."""
    found = []
    evidence: dict[str, Any] = {"times": facts.moves_inside, "cosine_with_parameters": facts.move_along_weights}
    if facts.moves_inside > facts.reference_moves_inside and facts.move_along_weights < -0.99:
        message = f"the parameters shrink {facts.moves_inside} times in the window, outside the optimizer's step"
        found.append(_finding(facts, facts.step, "weight_decay_per_micro_batch", evidence, message))
    elif facts.moves_inside > facts.reference_moves_inside:
        message = f"the parameters move {facts.moves_inside} times inside the window"
        found.append(_finding(facts, facts.step, UNEXPLAINED, evidence, message))
    if facts.clips_scaled:
        message = "gradients are clipped while the loss scale is still in them"
        found.append(_finding(facts, facts.step, "clip_before_unscale", {"scale": facts.scale}, message))
    if facts.stale and (facts.gradients_agree or facts.fits.get("stale", math.inf) <= facts.gate):
        message = "the window begins with the gradients of the one before, and the step uses them"
        found.append(_finding(facts, facts.step, "gradients_not_cleared", {"scale": facts.scale}, message))
    if facts.gradients_agree:
        return found
    if facts.loss_scales > 1:
        message = f"the loss scale changes inside the window ({facts.loss_scales} values)"
        found.append(_finding(facts, facts.step, "scaler_updated_in_window", {"scale": facts.scale}, message))
    if facts.active_clips_inside and not facts.clips_scaled and _sum_is_right(facts):
        evidence = {"active_clips_inside": facts.active_clips_inside, "scale": facts.scale, "cosine": facts.cosine}
        message = f"clipped {facts.active_clips_inside} times inside the window; unclipped, the sum is the full gradient"
        found.append(_finding(facts, facts.step, "clip_per_micro_batch", evidence, message))
    return found


def _sum_is_right(facts: StepFacts) -> bool:
    """The unclipped contributions add up to the reference gradient, up to a factor of the number of micro-batches."""
    return min(facts.fits.get(f"sum*{name}", math.inf) for name in ("1", "1/N", "1/K", "N")) <= facts.gate


def _last_only(facts: StepFacts) -> list[Finding]:
    fit = facts.fits.get("since_clear", math.inf)
    if not facts.cleared_inside or not fit <= facts.gate:
        return []
    evidence = {"cleared_inside": facts.cleared_inside, "micro_batches": facts.backwards, "fit": fit, "cosine": facts.cosine}
    message = f"gradients are cleared {facts.cleared_inside} times inside the window: only what came after counts"
    return [_finding(facts, facts.step, "gradients_cleared_in_window", evidence, message)]


def _replicas(facts: StepFacts) -> list[Finding]:
    for name, factor in (("W", facts.ranks), ("1/W", 1 / facts.ranks)):
        fit = facts.fits.get(name, math.inf)
        if facts.ranks > 1 and fit <= facts.gate and (facts.accumulation_steps == 1 or facts.ranks != facts.accumulation_steps):
            evidence = {"scale": facts.raw_scale, "factor": factor, "ranks": facts.ranks, "fit": fit}
            message = f"{factor:g} times the reference's gradient on {facts.ranks} ranks: sum and mean over replicas are mixed up"
            return [_finding(facts, facts.step, "replica_scale", evidence, message)]
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
    ):
        if factor == 1 or (name == "K/N" and not short):
            continue
        fit = facts.fits.get(name, math.inf)
        if fit <= facts.gate:
            evidence = {"scale": facts.raw_scale, "cosine": facts.raw_cosine, "factor": factor, "fit": fit, "gate": facts.gate}
            if facts.clipped and facts.fits.get("clipped_then_divided", math.inf) <= facts.gate:
                why = f"the undivided sum is clipped, and divided by {n} afterwards"
                return [_finding(facts, facts.step, "clip_before_unscale", evidence, why)]
            if facts.distance <= facts.gate:
                why += "; active clipping hides it in this run"
            return [_finding(facts, facts.step, cause, evidence, why)]
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
    return [_finding(facts, facts.step, "low_precision_accumulator", evidence, message)]


def _weighted(facts: StepFacts) -> list[Finding]:
    """The reference gradient is a sum of the contributions with other weights: the micro-batches themselves are right."""
    usable = len(facts.weights) > 1 and facts.condition <= CONDITION_LIMIT and all(w > 0 for w in facts.weights)
    if (
        not usable
        or not facts.fits.get("span", math.inf) <= facts.gate
        or not facts.fits.get("plain_sum", math.inf) <= facts.gate
    ):
        return []
    weights, n = facts.weights, facts.accumulation_steps
    mean = sum(weights) / len(weights)
    evidence = {"right_weights": weights, "cosine": facts.raw_cosine, "scale": facts.raw_scale, "condition": facts.condition}
    message = "micro-batches count equally although they hold unequal numbers of loss terms; right weights: " + ", ".join(
        f"{w:.3g}" for w in weights
    )
    found = [_finding(facts, facts.step, "mean_of_means", evidence, message)]
    short = len(weights) < n
    for factor, cause in (
        (n / len(weights) if short else 0, "short_window_divided_by_n"),
        (1 / n, "loss_not_divided"),
        (n, "loss_divided_twice"),
    ):
        if n > 1 and factor and abs(mean / factor - 1) <= max(facts.gate, 1e-3):
            message = f"besides, the gradient as a whole is {1 / mean:.4g} times what it should be"
            found.append(_finding(facts, facts.step, cause, {"factor": 1 / mean, "right_weights": weights}, message))
    return found


def _overwritten(facts: StepFacts) -> list[Finding]:
    for name, which in (("first", "first"), ("last", "last")):
        fit = facts.fits.get(name, math.inf)
        if facts.backwards > 1 and fit <= facts.gate and _sum_is_right(facts):
            evidence = {"fit": fit, "micro_batches": facts.backwards}
            message = f"only the {which} micro-batch of the window reaches the step"
            return [_finding(facts, facts.step, "accumulator_overwritten", evidence, message)]
    return []


def _regulariser(facts: StepFacts) -> list[Finding]:
    for name, what in (("along_weights", "the parameters"), ("along_signs", "the signs of the parameters")):
        fit = facts.fits.get(name, math.inf)
        if fit <= max(facts.gate / max(facts.raw_distance, facts.gate), facts.gate):
            evidence = {"fit": fit, "distance": facts.raw_distance}
            message = f"the gradients differ by a multiple of {what}: a penalty is not divided over the micro-batches"
            return [_finding(facts, facts.step, "auxiliary_loss_scale", evidence, message)]
    return []


def _other_computation(facts: StepFacts) -> Finding:
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
    if outside and facts.draws and not facts.dropout and not facts.batch_norm and facts.rows != "different":
        return _finding(facts, facts.step, "stochastic_layers", evidence, "random numbers are drawn inside the forward")
    if outside and facts.coupled and not facts.draws and facts.rows != "different":
        message = "no weights of the micro-batches give the full gradient: the loss of a row depends on the outputs of others"
        return _finding(facts, facts.step, "non_separable_loss", evidence, message)
    message = "the gradients differ, and no known cause reproduces how"
    return _finding(facts, facts.step, UNEXPLAINED, evidence, message)


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
        return [_finding(facts, facts.step, "weight_decay_per_micro_batch", evidence, message)]
    if facts.state_distance > facts.state_gate:
        message = "equal gradients, but the optimizer's state advanced differently"
        return [_finding(facts, facts.step, "optimizer_state_per_micro_batch", evidence, message)]
    return [_finding(facts, facts.step, UNEXPLAINED, evidence, "equal gradients and state, but another update")]


# -- what gradients cannot show -----------------------------------------------------------------------------------------


def _schedule(run: RunFacts) -> list[Finding]:
    pairs = list(zip(run.lrs, run.reference_lrs, strict=False))
    first = next((i for i, (mine, theirs) in enumerate(pairs) if not _same(mine, theirs)), None)
    evidence: dict[str, Any] = {
        "learning_rates": [lrs[0] for lrs in run.lrs if lrs],
        "reference_learning_rates": [lrs[0] for lrs in run.reference_lrs if lrs],
        "schedule_calls_per_step": list(run.schedule_calls),
    }
    if first is None:
        return []
    calls, usual = max(run.schedule_calls, default=0), max(run.reference_schedule_calls, default=0)
    if calls > usual or run.lr_moves_inside or _runs_ahead(run):
        rate, wanted = _first(run.lrs, first), _first(run.reference_lrs, first)
        message = f"the learning-rate schedule advances per micro-batch: {rate:.4g} instead of {wanted:.4g}"
        return [_finding(run, first, "schedule_per_micro_batch", evidence, message)]
    message = "the learning rates differ, and not as if the schedule ran faster"
    return [_finding(run, first, UNEXPLAINED, {**evidence, "what": "gradient"}, message)]


def _runs_ahead(run: RunFacts) -> bool:
    """The candidate's rate at step t is the reference's at N t + offset, for one offset, at two steps at least."""
    n = run.accumulation_steps
    for offset in range(n):
        pairs = [
            (mine, run.reference_lrs[t * n + offset]) for t, mine in enumerate(run.lrs) if t * n + offset < len(run.reference_lrs)
        ]
        if len(pairs) >= 2 and all(_same(mine, theirs) for mine, theirs in pairs):
            return True
    return False


def _same(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=SAME_LR, abs_tol=1e-300) for x, y in zip(a, b, strict=True))


def _first(lrs: Sequence[Sequence[float]], index: int) -> float:
    return lrs[index][0] if lrs[index] else math.nan


def _counters(run: RunFacts) -> list[Finding]:
    pairs = list(zip(run.state_steps, run.reference_state_steps, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a is not None and b is not None and a != b), None)
    if first is None:
        return []
    evidence = {"state_steps": list(run.state_steps), "reference_state_steps": list(run.reference_state_steps)}
    message = f"the optimizer's own step counter is {run.state_steps[first]:g} instead of {run.reference_state_steps[first]:g}"
    return [_finding(run, first, "optimizer_state_per_micro_batch", evidence, message)]


def _shadows(run: RunFacts) -> list[Finding]:
    off = next((seen for seen in run.shadow_distances if seen[1] > seen[2]), None)
    if off is None:
        return []
    first, distance, gate = off
    evidence = {
        "distance": distance,
        "gate": gate,
        "updates_per_step": list(run.shadow_updates),
        "reference_updates_per_step": list(run.reference_shadow_updates),
    }
    more = sum(run.shadow_updates) > sum(run.reference_shadow_updates)
    cause = "ema_per_micro_batch" if more else UNEXPLAINED
    message = "the averaged copy of the weights differs" + (": it is updated per micro-batch" if more else "")
    return [_finding(run, first, cause, {**evidence, "what": "average"}, message)]


def _report(run: RunFacts) -> list[Finding]:
    """Gradients agree, but the losses the function returned do not stand to the losses differentiated as at N=1."""
    mine, theirs = run.reported, run.reference_reported
    if mine is None or theirs is None or len(mine) != len(theirs):
        return []
    own = run.losses if len(run.losses) == len(mine) else ()
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        floor = _loss_floor(run, i)
        if math.isfinite(a) and math.isfinite(b) and abs(a - b) > floor * max(abs(b), 1e-12):
            evidence = {
                "reported": a,
                "reference_reported": b,
                "differentiated": own[i] if own else None,
                "factor": a / b if b else None,
            }
            message = f"the reported loss is {a:.5g} where N=1 reports {b:.5g}, with equal gradients"
            return [_finding(run, i if own else None, "loss_report_differs", evidence, message)]
    return []


def _loss_floor(run: RunFacts, index: int) -> float:
    """Ten times how far the differentiated losses of the two arms are apart, and no less than a float32 sum can show."""
    if index < min(len(run.losses), len(run.reference_losses)):
        a, b = run.losses[index], run.reference_losses[index]
        if math.isfinite(a) and math.isfinite(b) and b:
            return min(max(1e-4, 10 * abs(a - b) / abs(b)), 1e-2)
    return 1e-3


def _finding(facts: RunFacts | StepFacts, step: int | None, cause: str, evidence: Mapping[str, Any], message: str) -> Finding:
    return Finding(facts.accumulation_steps, step, cause, {"optimizer": facts.track, **evidence}, message)
