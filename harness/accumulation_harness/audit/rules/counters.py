"""What gradients cannot show: counters, averages of weights, running statistics, and what the function says of itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

from accumulation_harness.audit.compare.facts import RunFacts, StepFacts
from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.rules.finding import finding
from accumulation_harness.judge.cause import Cause

LOSSES_APART = 10.0  # times the distance of the differentiated losses, within which reported ones agree
LEAST_LOSS, MOST_LOSS = 1e-4, 1e-2  # relative; but no less than a float32 sum can show, and no more than this
UNKNOWN_LOSS = 1e-3  # relative; where the losses that were differentiated are not known
SMALLEST_LOSS = 1e-12  # below which a loss is compared absolutely


def counters(run: RunFacts) -> list[Finding]:
    """The optimizer's own step counter."""
    pairs = list(zip(run.mine.state_steps, run.reference.state_steps, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a is not None and b is not None and a != b), None)
    if first is None:
        return []
    evidence = {"state_steps": list(run.mine.state_steps), "reference_state_steps": list(run.reference.state_steps)}
    message = f"the optimizer's own step counter is {pairs[first][0]:g} instead of {pairs[first][1]:g}"
    return [finding(run, first, Cause.optimizer_state_per_micro_batch, "seen", evidence, message)]


def shadows(run: RunFacts) -> list[Finding]:
    """Averaged copies of the weights. Copies that nothing updates are no averages."""
    off = next((seen for seen in run.shadow_distances if seen[1] > seen[2]), None)
    mine, theirs = run.mine.shadow_updates, run.reference.shadow_updates
    if off is None or not any((*mine, *theirs)):
        return []
    first, distance, gate = off
    evidence = {
        "distance": distance,
        "gate": gate,
        "updates_per_step": list(mine),
        "reference_updates_per_step": list(theirs),
        "what": "average",
    }
    more = run.shadow_moves_inside or sum(mine) > sum(theirs)
    cause = Cause.ema_per_micro_batch if more else Cause.unexplained
    message = "the averaged copy of the weights differs" + (": it is updated per micro-batch" if more else "")
    return [finding(run, first, cause, "average", evidence, message)]


def statistics(run: RunFacts) -> list[Finding]:
    """Running statistics that are updated more often, although the gradients agree."""
    pairs = list(zip(run.mine.norm_updates, run.reference.norm_updates, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return []
    updates = {"updates": list(run.mine.norm_updates), "reference_updates": list(run.reference.norm_updates)}
    message = f"running statistics of BatchNorm are updated {pairs[first][0]} times by then, and {pairs[first][1]} times at N=1"
    return [finding(run, first, Cause.batch_statistics, "statistics", {**updates, "what": "statistics"}, message)]


def buffers(run: RunFacts, steps: Sequence[StepFacts]) -> list[Finding]:
    """Buffers that the model's forward updates, although the gradients agree."""
    off = next((facts for facts in steps if facts.layers.buffers), None)
    if off is None:
        return []
    names = off.layers.buffers
    message = f"equal gradients, but the model's buffers differ ({', '.join(names[:4])}): its forward updates them"
    evidence = {"buffers": names, "what": "statistics"}
    return [finding(run, off.step, Cause.batch_statistics, "statistics", evidence, message)]


def counts(run: RunFacts) -> list[Finding]:
    """Steps, samples or tokens that the function says it has seen, and that are not those of N=1."""
    mine, theirs = run.mine.counts, run.reference.counts
    off = [key for key, count in mine.items() if theirs.get(key, count) != count]
    if not off:
        return []
    evidence = {"counts": dict(mine), "reference_counts": dict(theirs)}
    told = "; ".join(f"{key}: {mine[key]:g} instead of {theirs[key]:g}" for key in off)
    message = f"the function counts otherwise than at N=1, with equal gradients: {told}"
    return [finding(run, None, Cause.counter_wrong, "report", evidence, message)]


def reported(run: RunFacts) -> list[Finding]:
    """Gradients agree, but the losses the function returned do not stand to the losses differentiated as at N=1."""
    mine, theirs = run.mine.reported, run.reference.reported
    if mine is None or theirs is None or len(mine) != len(theirs):
        return []
    own = run.mine.losses if len(run.mine.losses) == len(mine) else ()
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if math.isfinite(a) and math.isfinite(b) and abs(a - b) > _loss_gate(run, i) * max(abs(b), SMALLEST_LOSS):
            evidence = {
                "reported": a,
                "reference_reported": b,
                "differentiated": own[i] if own else None,
                "factor": a / b if b else None,
            }
            message = f"the reported loss is {a:.5g} where N=1 reports {b:.5g}, with equal gradients"
            return [finding(run, i if own else None, Cause.loss_report_differs, "report", evidence, message)]
    return []


def _loss_gate(run: RunFacts, index: int) -> float:
    """Relative distance of two reported losses that the differentiated losses of the two arms explain."""
    if index < min(len(run.mine.losses), len(run.reference.losses)):
        a, b = run.mine.losses[index], run.reference.losses[index]
        if math.isfinite(a) and math.isfinite(b) and b:
            return min(max(LEAST_LOSS, LOSSES_APART * abs(a - b) / abs(b)), MOST_LOSS)
    return UNKNOWN_LOSS
