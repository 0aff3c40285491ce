"""Norms of the gradient of each parameter tensor, accumulated and of the full batch, at the same weights along a training."""

from __future__ import annotations

from accumulation_harness.config import Precision
from accumulation_harness.experiments.shared.convergence import consumed
from accumulation_harness.experiments.shared.measuring import (
    OnStep,
    Row,
    Setting,
    accumulated,
    full_batch,
    take_step,
)


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Measure the L2 norm of every tensor's gradient, in float64.

    The full batch trains; at each probe an arm of every N starts from its weights and takes the same window.

    Args:
        setting: The trial.
        on_step: Not called.

    Returns:
        One row per N, tensor and probed step.
    """
    config = setting.config
    full = setting.arm(full_batch(config), precision=Precision.float64)
    names = [name for name, _ in full.model.named_parameters()]
    sizes = [p.numel() for p in full.model.parameters()]
    rows: list[Row] = []
    for t, ids in enumerate(setting.windows()):
        window, state = setting.exact.batch(ids), full.model.state_dict()
        for num in config.accumulation_steps if t % config.probe_every == 0 else ():
            own, other = (
                consumed(setting, recipe, window, t, state=state).split(sizes)
                for recipe in (full_batch(config), accumulated(config, num))
            )
            rows += [
                {"accumulation_steps": num, "step": t, "tensor": name, "full_norm": float(a.norm()),
                 "accumulated_norm": float(b.norm())}
                for name, a, b in zip(names, own, other, strict=True)
            ]  # fmt: skip
        with setting.randomness(t):
            take_step(full, window)
    return rows
