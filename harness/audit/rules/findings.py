"""From plain numbers to causes (the names of the catalogue of faults): windows, rows, schedules, counters, reports. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from harness.audit.compare.facts import RunFacts, StepFacts
from harness.audit.evidence import Finding
from harness.audit.rules.gradient_rules import UNEQUAL, explain_step, finding
from harness.judge.cause import Cause

STRETCHED = 0.03  # of the range of the rates, within which a schedule laid out for more steps reproduces them
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
            said = [one for one in said if one.cause != Cause.unexplained]
        found += said
        if not facts.backwards and not facts.reference_backwards and not facts.agrees:
            break  # only weights were seen: later steps start from other weights
    if not broken_off:
        found += _schedule(run) + _counters(run) + _shadows(run) + _statistics(run)
        found = found or _buffers(run, steps)
        clean = not found and all(facts.agrees for facts in steps)
        found += _report(run) + _counts(run) if clean else []
    return first_of_each(_told_apart(found, run))


def _told_apart(found: list[Finding], run: RunFacts) -> list[Finding]:
    """Short windows are ambiguous: K/N is 1/N where K is 1, and a growing scale looks like unequal terms where K is 2 or 3."""
    whole = [t for t, count in enumerate(run.backwards) if count == run.accumulation_steps]
    full = {f.cause for f in found if f.optimizer_step in whole}
    other = {"short_window_divided_by_n": "loss_divided_twice"}
    one = 1 / run.accumulation_steps
    found = [f for f in found if not (f.evidence.get("factor") == one and other.get(f.cause) in full)]
    growths = [f.evidence["factor"] for f in found if f.cause == "scaler_updated_in_window" and "factor" in f.evidence]
    return [f for f in found if not (f.cause == "mean_of_means" and any(_grows(f, growth) for growth in growths))]


def _grows(one: Finding, growth: float) -> bool:
    """Whether the weights of a window too short to tell fall as they do in longer ones."""
    ratios = [a / b for a, b in pairwise(one.evidence.get("right_weights", ()))]
    return bool(ratios) and all(abs(ratio / growth - 1) <= UNEQUAL for ratio in ratios)


def first_of_each(findings: Sequence[Finding]) -> list[Finding]:
    """One finding per cause and arm, the first, with the steps it was seen at; `unexplained` only after nothing else."""
    kept: dict[tuple[int, str], Finding] = {}
    steps: dict[tuple[int, str], list[int]] = {}
    for one in findings:
        key = (one.accumulation_steps, one.cause)
        kept.setdefault(key, one)
        seen = [] if one.optimizer_step is None else one.evidence.get("steps", [one.optimizer_step])
        steps[key] = sorted({*steps.get(key, []), *seen})
    for key, one in kept.items():
        one.evidence["steps"] = steps[key]
    explained = {key[0] for key, one in kept.items() if one.cause != Cause.unexplained}
    return [f for f in kept.values() if f.cause != Cause.unexplained or f.accumulation_steps not in explained or _own_kind(f)]


def _own_kind(finding: Finding) -> bool:
    """An unexplained step stays beside explained ones: it is another difference. Updates after a wrong gradient are not."""
    return finding.evidence.get("what") == "gradient"


# -- steps and windows ------------------------------------------------------------------------------------------------


def _structure(run: RunFacts, steps: Sequence[StepFacts]) -> list[Finding]:
    """Windows that are not the reference's; at most one finding, since what follows it cannot be aligned."""
    if lost := [(step, count) for step, count in run.resumed if count and not _accounted(steps, step)]:
        return [_resumed(run, *lost[0])]
    differs = run.steps != run.reference_steps or "different" in run.windows or any(not facts.gradients_agree for facts in steps)
    if differs and (run.broken_windows or run.reference_broken_windows):
        return [_non_finite(run)]
    if run.idle_steps > run.reference_idle_steps:
        return [_idle(run)]
    if run.steps > run.reference_steps and _one_backward_each(run):
        return [_every_micro_batch(run)]
    first = next((i for i, window in enumerate(run.windows) if window == "different" and not _accounted(steps, i)), None)
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
    if first is not None and run.foreign and not run.never:
        message = f"the windows hold {run.foreign} rows that N=1 leaves out"
        return [finding(run, place, "window_misplaced", evidence, message)]
    if first is not None and run.foreign and facts is not None and facts.outside_draws:
        return [finding(run, place, "stochastic_layers", evidence, "the rows themselves are drawn at random per micro-batch")]
    if first is not None and run.foreign:
        message = "the windows hold rows that the reference never saw: other data, or rows mixed within a micro-batch"
        return [finding(run, place, Cause.unexplained, evidence, message)]
    if sum(run.repeated):
        return [finding(run, place, "samples_repeated", evidence, f"{sum(run.repeated)} rows are used more often than at N=1")]
    if first is None and run.steps < run.reference_steps:
        message = f"{run.steps} optimizer steps instead of {run.reference_steps}: the end of the data is left out"
    elif first is None:
        message = f"{run.steps} optimizer steps instead of {run.reference_steps}"
    else:
        message = f"optimizer step {place} takes other rows than at N=1: a window is dropped, cut short or straddles the epoch"
    return [finding(run, place, "window_misplaced", evidence, message)]


def _accounted(steps: Sequence[StepFacts], index: int) -> bool:
    """Whether the gradients agree, or do without the rows of another optimizer's loss."""
    return any(
        facts.step == index and (facts.gradients_agree or facts.fits.get("without_foreign", math.inf) <= facts.gate)
        for facts in steps
    )


def _one_backward_each(run: RunFacts) -> bool:
    """Every step follows one backward, while the reference's steps are as many times fewer as there are micro-batches."""
    return max(run.backwards, default=0) <= max(run.reference_backwards, default=1) and run.steps >= 1.5 * run.reference_steps


def _resumed(run: RunFacts, step: int, lost: int) -> Finding:
    evidence = {"backwards_lost": lost, "backwards_per_step": list(run.backwards), "rows_never_seen": run.never}
    message = f"another optimizer goes on inside a window: the gradients of the {lost} micro-batches before it are lost"
    return finding(run, step, "resume_in_window", evidence, message)


def _every_micro_batch(run: RunFacts) -> Finding:
    evidence = {
        "optimizer_steps": run.steps,
        "reference_optimizer_steps": run.reference_steps,
        "backwards_per_step": list(run.backwards),
    }
    message = f"the optimizer steps after every micro-batch: {run.steps} steps instead of {run.reference_steps}"
    return finding(run, 0, "step_every_micro_batch", evidence, message)


def _idle(run: RunFacts) -> Finding:
    evidence = {"steps_that_moved_nothing": run.idle_steps, "optimizer_steps": run.steps, "state_steps": list(run.state_steps)}
    message = f"{run.idle_steps} optimizer steps inside windows move no parameter but advance the optimizer's state"
    return finding(run, 0, "optimizer_state_per_micro_batch", evidence, message)


def _non_finite(run: RunFacts) -> Finding:
    place = min((*run.broken_windows, *run.reference_broken_windows))
    evidence = {
        "windows_with_non_finite_values": list(run.broken_windows),
        "reference_windows_with_non_finite_values": list(run.reference_broken_windows),
        "steps_left_out_by_the_scaler": list(run.skipped),
        "reference_steps_left_out_by_the_scaler": list(run.reference_skipped),
        "optimizer_steps": run.steps,
        "reference_optimizer_steps": run.reference_steps,
        "backwards_per_step": list(run.backwards),
    }
    message = "a micro-batch with non-finite values is left out or passed on by itself; the full batch goes as a whole"
    if run.skipped != run.reference_skipped:
        mine, theirs = list(run.skipped) or "none", list(run.reference_skipped) or "none"
        message = f"the GradScaler leaves out optimizer steps {mine}, at N=1 {theirs}: only one of the two overflows there"
    return finding(run, place, "non_finite_micro_batch", evidence, message)


# -- one step ---------------------------------------------------------------------------------------------------------


# -- what gradients cannot show -----------------------------------------------------------------------------------------


def _schedule(run: RunFacts) -> list[Finding]:
    pairs = list(zip(run.lrs, run.reference_lrs, strict=False))
    first = next((i for i, (mine, theirs) in enumerate(pairs) if not _same(mine, theirs)), None)
    evidence: dict[str, Any] = {
        "laid_out_for_steps": run.horizon,
        "reference_laid_out_for_steps": run.reference_horizon,
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
        return [finding(run, first, "schedule_per_micro_batch", evidence, message)]
    if _stretched(run) or _too_long(run):
        message = "the learning-rate schedule is laid out for micro-batches, and advances once per optimizer step: it lags behind"
        return [finding(run, first, "schedule_per_micro_batch", evidence, message)]
    message = "the learning rates differ, and not as if the schedule counted micro-batches"
    return [finding(run, first, Cause.unexplained, {**evidence, "what": "gradient"}, message)]


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


def _too_long(run: RunFacts) -> bool:
    """The schedule is laid out for N times the steps of the reference's, give or take a window."""
    wanted = run.accumulation_steps * run.reference_horizon
    return run.accumulation_steps > 1 and wanted > 0 and abs(run.horizon - wanted) <= run.accumulation_steps


def _stretched(run: RunFacts) -> bool:
    """The candidate's rate at step t is the reference's at t / r, with r the number of backwards per optimizer step."""
    mine, theirs = [lrs[0] for lrs in run.lrs if lrs], [lrs[0] for lrs in run.reference_lrs if lrs]
    reach = max(theirs, default=0.0) - min(theirs, default=0.0)
    if len(mine) < 3 or len(theirs) < 3 or not reach:
        return False
    for ratio in (run.accumulation_steps, sum(run.backwards) / max(1, sum(run.reference_backwards))):
        wanted = [_between(theirs, t / ratio) for t in range(len(mine))]
        moved = max(abs(a - mine[0]) for a in mine)
        if (
            ratio > 1
            and moved
            and all(abs(a - b) <= min(STRETCHED * reach, 0.2 * moved) for a, b in zip(mine, wanted, strict=True))
        ):
            return True
    return False


def _between(values: Sequence[float], place: float) -> float:
    """Linear interpolation; the last value beyond the end."""
    low = min(int(place), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - int(place)) * (values[high] - values[low])


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
    return [finding(run, first, "optimizer_state_per_micro_batch", evidence, message)]


def _shadows(run: RunFacts) -> list[Finding]:
    off = next((seen for seen in run.shadow_distances if seen[1] > seen[2]), None)
    if off is None or not any((*run.shadow_updates, *run.reference_shadow_updates)):
        return []  # copies that nothing updates are no averages
    first, distance, gate = off
    evidence = {
        "distance": distance,
        "gate": gate,
        "updates_per_step": list(run.shadow_updates),
        "reference_updates_per_step": list(run.reference_shadow_updates),
    }
    more = run.shadow_moves_inside or sum(run.shadow_updates) > sum(run.reference_shadow_updates)
    cause = "ema_per_micro_batch" if more else Cause.unexplained
    message = "the averaged copy of the weights differs" + (": it is updated per micro-batch" if more else "")
    return [finding(run, first, cause, {**evidence, "what": "average"}, message)]


def _statistics(run: RunFacts) -> list[Finding]:
    """Running statistics that are updated more often, although the gradients agree."""
    pairs = list(zip(run.norm_updates, run.reference_norm_updates, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return []
    evidence = {"updates": list(run.norm_updates), "reference_updates": list(run.reference_norm_updates), "what": "statistics"}
    message = f"running statistics of BatchNorm are updated {pairs[first][0]} times by then, and {pairs[first][1]} times at N=1"
    return [finding(run, first, "batch_statistics", evidence, message)]


def _buffers(run: RunFacts, steps: Sequence[StepFacts]) -> list[Finding]:
    """Buffers that the model's forward updates, although the gradients agree."""
    off = next((facts for facts in steps if facts.buffers), None)
    if off is None:
        return []
    message = f"equal gradients, but the model's buffers differ ({', '.join(off.buffers[:4])}): its forward updates them"
    return [finding(run, off.step, "batch_statistics", {"buffers": off.buffers, "what": "statistics"}, message)]


def _counts(run: RunFacts) -> list[Finding]:
    """Steps, samples or tokens that the function says it has seen, and that are not those of N=1."""
    off = [key for key, count in run.counts.items() if run.reference_counts.get(key, count) != count]
    if not off:
        return []
    evidence = {"counts": dict(run.counts), "reference_counts": dict(run.reference_counts)}
    message = "; ".join(f"{key}: {run.counts[key]:g} instead of {run.reference_counts[key]:g}" for key in off)
    return [
        finding(
            run, None, "counter_wrong", evidence, f"the function counts otherwise than at N=1, with equal gradients: {message}"
        )
    ]


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
            return [finding(run, i if own else None, "loss_report_differs", evidence, message)]
    return []


def _loss_floor(run: RunFacts, index: int) -> float:
    """Ten times how far the differentiated losses of the two arms are apart, and no less than a float32 sum can show."""
    if index < min(len(run.losses), len(run.reference_losses)):
        a, b = run.losses[index], run.reference_losses[index]
        if math.isfinite(a) and math.isfinite(b) and b:
            return min(max(1e-4, 10 * abs(a - b) / abs(b)), 1e-2)
    return 1e-3
