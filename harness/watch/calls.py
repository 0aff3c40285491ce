"""Rung 1: calls and movements that have no place inside a window."""

from __future__ import annotations

from collections.abc import Iterator

from harness.judge.cause import Cause
from harness.watch.evidence import Finding, Window


def misplaced(window: Window) -> Iterator[Finding]:
    """What was called, or moved, between two backwards of one window."""
    inside = [call for m in window.micro_batches[1:] for call in m.calls]
    all_calls = [*inside, *window.micro_batches[0].calls, *window.calls]
    rates = {m.lrs for m in window.micro_batches}
    if inside.count("schedule") or len(rates) > 1:
        lrs = [m.lrs[0] for m in window.micro_batches if m.lrs]
        listed = ", ".join(f"{lr:.4g}" for lr in lrs[:8])
        yield _finding(Cause.schedule_per_micro_batch, window, f"the learning rate is advanced inside the window ({listed})")
    if "unscale" in inside or "update scale" in inside:
        yield _finding(Cause.scaler_updated_in_window, window, "the loss scaler unscales or is updated between two backwards")
    if "clip scaled" in all_calls and any(m.scale != 1 for m in window.micro_batches):
        scale = window.micro_batches[-1].scale
        yield _finding(Cause.clip_before_unscale, window, f"gradients are clipped with the loss scale {scale:g} in them")
    if inside.count("average"):
        yield _finding(Cause.ema_per_micro_batch, window, "the average of the weights is updated between two backwards")
    if window.state_moved and not window.moved:
        yield _finding(Cause.optimizer_state_per_micro_batch, window, "the optimizer's state changes between two backwards")


def _finding(cause: Cause, window: Window, message: str) -> Finding:
    return Finding(cause=cause, message=message, window=window.index, rung="ledger")
