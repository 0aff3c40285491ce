"""Norms of the gradient of each parameter tensor, accumulated and of the full batch, at the same weights along a training."""

from __future__ import annotations

import torch
from torch import Tensor

from accumulation_harness.config import Precision
from accumulation_harness.measure.lock_step import Setting, Watch
from accumulation_harness.measure.training import OnStep, Row
from accumulation_harness.measure.trial import accumulated, full_batch
from accumulation_harness.recipes.recipe import Arm, take_step
from accumulation_harness.workloads import Batch


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per N, tensor and probed step: L2 norms, in float64.

    The full batch trains; at each probe an arm of every N starts from its weights and takes the same window.
    """
    config = setting.config
    full = setting.arm(full_batch(config), precision=Precision.float64)
    watch, names = Watch(full), [name for name, _ in full.model.named_parameters()]
    rows: list[Row] = []
    for t, ids in enumerate(setting.windows()):
        window, accumulated = setting.exact.batch(ids), {}
        if t % config.probe_every == 0:
            for num in config.accumulation_steps:
                accumulated[num] = _accumulated(setting, full, num, window, t)
        with setting.randomness(t):
            take_step(full, window)
        assert watch.gradient is not None
        own = _norms(full, watch.gradient)
        for num, norms in accumulated.items():
            rows += [
                {"accumulation_steps": num, "step": t, "tensor": name, "full_norm": a, "accumulated_norm": b}
                for name, a, b in zip(names, own, norms, strict=True)
            ]
    return rows


def _accumulated(setting: Setting, full: Arm, num: int, window: Batch, step: int) -> list[float]:
    """Norms by tensor of what an arm with `num` micro-batches consumes at the full batch's weights."""
    config = setting.config
    recipe = accumulated(config, num)
    arm = setting.arm(recipe, precision=Precision.float64, steps=1)
    arm.model.load_state_dict(full.model.state_dict())
    watch = Watch(arm)
    with setting.randomness(step):
        take_step(arm, window)
    assert watch.gradient is not None
    return _norms(arm, watch.gradient)


def _norms(arm: Arm, gradient: Tensor) -> list[float]:
    parts = gradient.split([p.numel() for p in arm.model.parameters()])
    return [float(torch.linalg.vector_norm(part)) for part in parts]
