"""Rung 1: calls and movements that have no place inside a window."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from accumulation_harness.compare.linear import proportion
from accumulation_harness.judge.cause import Cause
from accumulation_harness.watch.evidence import Call, Finding, Remark, Rung, Window
from accumulation_harness.watch.slopes import Loss

STILL = 1e-6  # of the weights: what no rounding of a sketch explains


def misplaced(window: Window) -> Iterator[Finding]:
    """What was called, or moved, between two backwards of one window."""
    inside = [call for m in window.micro_batches[1:] for call in m.calls]
    all_calls = [*inside, *window.micro_batches[0].calls, *window.calls]
    rates = {m.lrs for m in window.micro_batches}
    if Call.schedule in inside or len(rates) > 1:
        lrs = [m.lrs[0] for m in window.micro_batches if m.lrs]
        listed = ", ".join(f"{lr:.4g}" for lr in lrs[:8])
        yield _finding(Cause.schedule_per_micro_batch, window, f"the learning rate is advanced inside the window ({listed})")
    if {Call.unscale, Call.update_scale} & {*inside}:
        yield _finding(Cause.scaler_updated_in_window, window, "the loss scaler unscales or is updated between two backwards")
    if Call.clip_scaled in all_calls and any(m.scale != 1 for m in window.micro_batches):
        scale = window.micro_batches[-1].scale
        yield _finding(Cause.clip_before_unscale, window, f"gradients are clipped with the loss scale {scale:g} in them")
    if Call.average in inside or window.averaged is not None:
        by = f" (by {window.averaged:.4g} of its distance)" if window.averaged is not None else ""
        yield _finding(Cause.ema_per_micro_batch, window, f"the average of the weights moves between two backwards{by}")
    if (
        window.first is not None
        and window.parameters is not None
        and not (window.moved or window.late or len(window.micro_batches) < 2)
    ):
        factor, off = proportion(window.parameters, window.first)
        if abs(factor - 1) > STILL and off <= STILL:
            what = f"the weights are multiplied by {factor:.6g} inside the window"
            yield _finding(Cause.weight_decay_per_micro_batch, window, what)
    if window.state_moved and not window.moved:
        yield _finding(Cause.optimizer_state_per_micro_batch, window, "the optimizer's state changes between two backwards")


def doubtful(window: Window) -> Iterator[Remark]:
    """What a window with all its weights and sums right may have, and no right one should."""
    if any(Call.epoch in m.calls for m in window.micro_batches[1:]):
        yield Remark.over_the_end
    if window.as_often:
        yield Remark.as_often
    parts = [m.contribution for m in window.micro_batches if m.contribution is not None and m.contribution.any()]
    if len({part.any(axis=1).tobytes() for part in parts}) > 1:
        yield Remark.unreached
    for k, part in enumerate(parts[1:], start=1):
        if any(np.linalg.norm(part - other) <= STILL * np.linalg.norm(part) for other in parts[:k]):
            yield Remark.same_gradient
            return


def same_labels(window: Window) -> bool | None:
    """Whether all micro-batches have the same labels in the same order; None where that is not known, or says nothing."""
    labels = [m.slopes[0].labels for m in window.micro_batches if m.slopes and m.slopes[0].kind is Loss.cross_entropy]
    rows = {m.slopes[0].rows for m in window.micro_batches if m.slopes}
    if len(labels) < 2 or len(rows) > 1 or any(math.isnan(mark) for mark in labels):
        return None
    return len(set(labels)) == 1


def laid_out(schedule: object) -> int | None:
    """The number of steps that a schedule of PyTorch's is laid out for, those before its last part included."""
    parts, begins = getattr(schedule, "_schedulers", None), getattr(schedule, "_milestones", None)
    if parts and begins:
        last = laid_out(parts[-1])
        return None if last is None else begins[-1] + last
    names = ("total_iters", "T_max", "total_steps", "T_0")
    return next((number for name in names if isinstance(number := getattr(schedule, name, None), int)), None)


def is_moved(window: Window) -> bool:
    """Whether the weights at the step are others than those at the first backward."""
    first, last = window.first, window.parameters
    return first is not None and last is not None and bool(np.linalg.norm(last - first) > STILL * np.linalg.norm(first))


def _finding(cause: Cause, window: Window, message: str) -> Finding:
    return Finding(cause=cause, message=message, window=window.index, rung=Rung.ledger)
