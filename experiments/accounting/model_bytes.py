"""What training keeps between micro-batches, in bytes: parameters, gradients, optimizer state."""

from __future__ import annotations

import dataclasses

import torch

from accumulation_harness.experiments.shared.measuring import (
    BOUNDARY,
    Arm,
    OnStep,
    Recipe,
    Row,
    Setting,
    Stage,
    accumulated,
    take_step,
)
from accumulation_harness.measure.memory import num_bytes, of_step, state_tensors
from accumulation_harness.recipes.micro_batch import Even

CAST = torch.bfloat16  # of a model whose weights, gradients and state are all kept in 16 bits


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Measure the bytes of a model and its training.

    `alive_bytes` is of windows of N micro-batches of the same b = B / max N: gradients and activations where they are most.

    Args:
        setting: The trial.
        on_step: Not called.

    Returns:
        One row per N, N = 1 (the full batch) among them, and one at N = 1 for a model cast to 16 bits: `kept_in`.
    """
    nums = (1, *setting.config.accumulation_steps)
    rows = [_row(setting, num, None) | {"alive_bytes": _alive(setting, num, max(nums))} for num in nums]
    return [*rows, _row(setting, 1, CAST)]


def _row(setting: Setting, num: int, cast: torch.dtype | None) -> Row:
    """Bytes after one window: gradients as the optimizer finds them, state as it leaves it."""
    config, held = setting.config, [0]

    def weigh(arm: Arm) -> None:
        held[0] = num_bytes(p.grad for p in arm.model.parameters() if p.grad is not None)

    stages: tuple[Stage, ...] = (weigh, *BOUNDARY)
    recipe = dataclasses.replace(accumulated(config, num), at_boundary=stages)
    arm = setting.arm(recipe, steps=1)
    ids = next(setting.windows())
    if cast is None:
        take_step(arm, arm.workload.batch(ids))
    else:  # what the bytes are does not depend on the loss: any that gives every parameter a gradient does
        arm.model.to(cast)
        torch.stack([p.square().sum() for p in arm.model.parameters()]).sum().backward()
        weigh(arm)
        arm.optimizer.step()
    parameters = list(arm.model.parameters())
    return {
        "accumulation_steps": num,
        "micro_batch": max(recipe.split(config.effective_batch)),
        "kept_in": str(parameters[0].dtype).removeprefix("torch."),
        "num_parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": num_bytes(parameters),
        "gradient_bytes": held[0],
        "state_bytes": num_bytes(state_tensors(arm)),
    }


def _alive(setting: Setting, num: int, most: int) -> int:
    """Activations and gradients at their most over a second window of `num` micro-batches; the first allocates the state."""
    size = setting.config.effective_batch // most
    arm = setting.arm(Recipe(accumulation_steps=num, split=Even(size)), steps=2)
    ids = next(setting.windows())[: num * size]
    take_step(arm, arm.workload.batch(ids))
    return of_step(arm, arm.workload.batch(ids)).alive
