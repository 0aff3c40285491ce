"""Where a fault is looked for first: the line of the audited code that makes the call which it is about."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import replace

from accumulation_harness.audit.evidence import Call, Finding, Location, Run, Site
from accumulation_harness.judge.cause import Cause

LOSS: Sequence[Call] = ("backward", "forward")
FORWARD: Sequence[Call] = ("forward", "backward")
CALLS: Mapping[Cause, Sequence[Call]] = {  # of the others: LOSS
    **dict.fromkeys(
        (Cause.batch_statistics, Cause.stateful_forward, Cause.stochastic_layers, Cause.cached_weights_stale), FORWARD
    ),
    **dict.fromkeys(
        (
            Cause.window_misplaced,
            Cause.step_every_micro_batch,
            Cause.optimizer_state_per_micro_batch,
            Cause.weight_decay_per_micro_batch,
            Cause.ema_per_micro_batch,
        ),
        ("step",),
    ),
    Cause.gradients_cleared_in_window: ("zero_grad", "backward"),
    Cause.gradients_not_cleared: ("zero_grad", "step"),
    Cause.schedule_per_micro_batch: ("schedule", "step"),
    Cause.clip_per_micro_batch: ("clip", "backward"),
    Cause.clip_before_unscale: ("clip",),
    Cause.scaler_updated_in_window: ("update scale", "unscale"),
    Cause.resume_in_window: ("load",),
    Cause.loss_report_differs: (),
}
OF_KINDS: Mapping[str, Sequence[Call]] = {"schedule": ("schedule", "step"), "update": ("step",)}  # of what has no name


def located(finding: Finding, run: Run) -> Finding:
    """Return a finding with its location, if a call that it is about was seen.

    Of several lines, one that makes the call itself goes before one that calls a package, then the one that comes oftener (as a
    call inside a window does), but no oftener than the backward.

    Args:
        finding: What was found.
        run: The run whose calls were recorded.

    Returns:
        The finding, with file and line where they are known.
    """
    asked = OF_KINDS.get(finding.kind) if not finding.is_named else None
    calls = CALLS.get(finding.cause, LOSS) if asked is None else asked
    seen = [(site, call, count) for call in calls for site, count in run.sites.get(call, {}).items()]

    def rank(one: tuple[Site, Call, int]) -> tuple[bool, int, int]:
        site, call, count = one
        return not site.through, min(count, run.backwards), -calls.index(call)

    if not seen:
        return finding
    site, call, _ = max(seen, key=rank)
    return replace(finding, location=Location(site, call, linecache.getline(site.file, site.line).strip()))
