"""Norms of the gradient of each parameter tensor, accumulated and of the full batch, at the same weights along a training."""

from __future__ import annotations

import torch

from accumulation_harness.config import Precision
from accumulation_harness.experiments.shared.measuring import (
    Arm,
    Batch,
    OnStep,
    Row,
    Setting,
    Watch,
    accumulated,
    full_batch,
    take_step,
)


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per N, tensor and probed step: L2 norms, in float64.

    The full batch trains; at each probe an arm of every N starts from its weights and takes the same window.
    """
    config = setting.config
    full = setting.arm(full_batch(config), precision=Precision.float64)
    watch, names = Watch(full), [name for name, _ in full.model.named_parameters()]
    rows: list[Row] = []
    for t, ids in enumerate(setting.windows()):
        window, arms = setting.exact.batch(ids), {}
        if t % config.probe_every == 0:
            for num in config.accumulation_steps:
                arms[num] = setting.arm(accumulated(config, num), precision=Precision.float64, steps=1)
                arms[num].model.load_state_dict(full.model.state_dict())
        norms = {num: _norms(setting, arm, Watch(arm), window, t) for num, arm in arms.items()}
        own = _norms(setting, full, watch, window, t)
        rows += [
            {"accumulation_steps": num, "step": t, "tensor": name, "full_norm": a, "accumulated_norm": b}
            for num in norms
            for name, a, b in zip(names, own, norms[num], strict=True)
        ]
    return rows


def _norms(setting: Setting, arm: Arm, watch: Watch, window: Batch, step: int) -> list[float]:
    """Norms by tensor of what the arm consumes in the window."""
    with setting.randomness(step):
        take_step(arm, window)
    assert watch.gradient is not None
    parts = watch.gradient.split([p.numel() for p in arm.model.parameters()])
    return [float(torch.linalg.vector_norm(part)) for part in parts]
