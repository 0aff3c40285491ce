"""Rung 1: calls and movements that have no place inside a window."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from accumulation_harness.compare.linear import norm, proportion
from accumulation_harness.judge.cause import Cause
from accumulation_harness.watch.evidence import SCALES, Finding, Remark, Window
from accumulation_harness.watch.slopes import Loss

STILL = 1e-6  # of the weights: what no rounding of a sketch explains


def misplaced(window: Window) -> Iterator[Finding]:
    """Find what was called, or moved, between two backwards of one window.

    Args:
        window: The window.

    Yields:
        A finding each.
    """
    inside = [call for m in window.micro_batches[1:] for call in m.calls]
    all_calls = [*inside, *window.micro_batches[0].calls, *window.calls]
    rates, first = {m.lrs for m in window.micro_batches}, window.micro_batches[0].options
    if "schedule" in inside or len(rates) > 1:
        lrs = [m.lrs[0] for m in window.micro_batches if m.lrs]
        listed = ", ".join(f"{lr:.4g}" for lr in lrs[:8])
        yield _finding(Cause.schedule_per_micro_batch, window, f"the learning rate is advanced inside the window ({listed})")
    elif others := {name for m in window.micro_batches for name, value in m.options.items() if value != first.get(name)}:
        message = f"{', '.join(sorted(others))} of the optimizer changes inside the window"
        yield _finding(Cause.schedule_per_micro_batch, window, message)
    if SCALES & {*inside}:
        yield _finding(Cause.scaler_updated_in_window, window, "the loss scaler unscales or is updated between two backwards")
    if "clip scaled" in all_calls and any(m.scale != 1 for m in window.micro_batches):
        scale = window.micro_batches[-1].scale
        yield _finding(Cause.clip_before_unscale, window, f"gradients are clipped with the loss scale {scale:g} in them")
    if "average" in inside or window.averaged is not None:
        by = f" (by {window.averaged:.4g} of its distance)" if window.averaged is not None else ""
        yield _finding(Cause.ema_per_micro_batch, window, f"the average of the weights moves between two backwards{by}")
    second = window.micro_batches[min(1, len(window.micro_batches) - 1)].weights
    if window.first is not None and window.first.any() and second is not None and not window.moved:  # zeros: it is not known
        factor, off = proportion(second, window.first)
        if abs(factor - 1) > STILL and off <= STILL:
            what = f"the weights are multiplied by {factor:.6g} inside the window"
            yield _finding(Cause.weight_decay_per_micro_batch, window, what)
    if window.state_moved and not window.moved:
        yield _finding(Cause.optimizer_state_per_micro_batch, window, "the optimizer's state changes between two backwards")


def doubtful(window: Window) -> list[Remark]:
    """List what a window with all its weights and sums right may have, and no right one should; and what is to be said of it.

    Args:
        window: The window.

    Returns:
        The remarks that apply.
    """
    micro_batches = window.micro_batches
    parts = [m.contribution for m in micro_batches if m.contribution.any()]
    weights = [m.weights for m in micro_batches if m.weights is not None]
    found = {
        Remark.fed: len({m.fed for m in micro_batches}) > 1,
        Remark.over_the_end: any("epoch" in m.calls for m in micro_batches[1:]),
        Remark.moved_inside: any(norm(one - weights[0]) > STILL * norm(one) for one in weights),
        Remark.thawed: len({m.trained for m in micro_batches}) > 1,
        Remark.as_often: window.as_often,
        Remark.unreached: len({part.any(axis=1).tobytes() for part in parts}) > 1,
        Remark.same_gradient: any(norm(one - other) <= STILL * norm(one) for other, one in combinations(parts, 2)),
        Remark.half: window.half and all(m.scale == 1 for m in micro_batches),
        Remark.hooked: window.hooked,
        Remark.buffers_moved: window.buffers_moved and len(micro_batches) > 1,
    }
    return [remark for remark, holds in found.items() if holds]


def same_labels(window: Window) -> bool | None:
    """Decide whether all micro-batches have the same labels in the same order.

    Args:
        window: The window.

    Returns:
        None where that is not known, or says nothing.
    """
    labels = [m.slopes[0].labels for m in window.micro_batches if m.slopes and m.slopes[0].kind is Loss.cross_entropy]
    rows = {m.slopes[0].rows for m in window.micro_batches if m.slopes}
    if len(labels) < 2 or len(rows) > 1 or any(math.isnan(mark) for mark in labels):
        return None
    return len(set(labels)) == 1


def laid_out(schedule: object) -> int | None:
    """Count the steps that a schedule of PyTorch's is laid out for, those before its last part included.

    Args:
        schedule: The schedule.

    Returns:
        Its length in calls of `step`; None where it has none.
    """
    parts, begins = getattr(schedule, "_schedulers", None), getattr(schedule, "_milestones", None)
    if parts and begins:
        last = laid_out(parts[-1])
        return None if last is None else begins[-1] + last
    names = ("total_iters", "T_max", "total_steps", "T_0")
    return next((number for name in names if isinstance(number := getattr(schedule, name, None), int)), None)


def is_moved(window: Window) -> bool:
    """Decide whether the weights at the step are others than those at the first backward.

    Args:
        window: The window.

    Returns:
        True if they are; False also where they were not looked at.
    """
    first, last = window.first, window.parameters
    return first is not None and last is not None and norm(last - first) > STILL * norm(first)


def _finding(cause: Cause, window: Window, message: str) -> Finding:
    return Finding(cause=cause, message=message, window=window.index, rung="ledger")
