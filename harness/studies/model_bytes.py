"""What training keeps between micro-batches, in bytes: parameters, gradients, optimizer state."""

from __future__ import annotations

import dataclasses

from harness.measure.lock_step import Setting
from harness.measure.memory import num_bytes, state_tensors
from harness.measure.training import OnStep, Row
from harness.recipes.recipe import BOUNDARY, Arm, Stage, take_step
from harness.trial import accumulated


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per N, N = 1 (the full batch) among them."""
    return [_row(setting, num) for num in (1, *setting.config.accumulation_steps)]


def _row(setting: Setting, num: int) -> Row:
    """Bytes after one window: gradients as the optimizer finds them, state as it leaves it."""
    config, held = setting.config, [0]

    def weigh(arm: Arm) -> None:
        held[0] = num_bytes(p.grad for p in arm.model.parameters() if p.grad is not None)

    stages: tuple[Stage, ...] = (weigh, *BOUNDARY)
    recipe = dataclasses.replace(accumulated(config, num), at_boundary=stages)
    arm = setting.arm(recipe, steps=1)
    take_step(arm, arm.workload.batch(next(setting.windows())))
    parameters = list(arm.model.parameters())
    return {
        "accumulation_steps": num,
        "micro_batch": max(recipe.split(config.effective_batch)),
        "num_parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": num_bytes(parameters),
        "gradient_bytes": held[0],
        "state_bytes": num_bytes(state_tensors(arm)),
    }
