"""A training that is interrupted and resumed from its checkpoint, beside the same training that is not: equal to the last bit?"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from accumulation_harness.experiments.shared.measuring import (
    Arm,
    Batch,
    OnStep,
    Recipe,
    Row,
    Setting,
    accumulated,
    flatten,
    relative_distance,
    take_step,
)
from accumulation_harness.measure.optimizer_state import optimizer_state

AFTER = 2  # windows before the interruption: momentum and moments are there


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When a checkpoint is written, what it holds, and where training goes on from it."""

    in_window: bool = True
    keeps_gradients: bool = False
    replays_window: bool = False  # resumes with the window's first micro-batch instead of the next


CHECKPOINTS: Mapping[str, Checkpoint] = {
    "at_boundary": Checkpoint(in_window=False),
    "in_window": Checkpoint(),
    "in_window_with_gradients": Checkpoint(keeps_gradients=True),
    "in_window_replayed": Checkpoint(replays_window=True),
}


class Killed(Exception):
    """Raised in the middle of a window, where a process would end."""


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per N and way to write the checkpoint.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows with `arm`, `accumulation_steps`, `identical` (to the last bit) and `distance` (relative, of the weights).
    """
    rows = []
    for num in setting.config.accumulation_steps:
        recipe = accumulated(setting.config, num)
        straight = train(setting, recipe, None)
        for name, checkpoint in CHECKPOINTS.items():
            resumed = train(setting, recipe, checkpoint)
            rows.append(
                {
                    "arm": name,
                    "accumulation_steps": num,
                    "identical": identical(resumed, straight),
                    "distance": relative_distance(flatten(resumed.model.parameters()), flatten(straight.model.parameters())),
                }
            )
    return rows


def train(setting: Setting, recipe: Recipe, checkpoint: Checkpoint | None) -> Arm:
    """The configured steps in the configured precision; interrupted once, after `AFTER` windows, where there is a checkpoint.

    Args:
        setting: The trial's task, initial weights and windows.
        recipe: The recipe of the arm.
        checkpoint: How it is written and loaded, or None.

    Returns:
        The arm as it ended.
    """
    arm = setting.arm(recipe)
    for t, ids in enumerate(setting.windows()):
        window = arm.workload.batch(ids)
        with setting.randomness(t):
            if t == AFTER and checkpoint is not None:
                _interrupt(setting, arm, checkpoint, window)
            else:
                take_step(arm, window)
    return arm


def _interrupt(setting: Setting, arm: Arm, checkpoint: Checkpoint, window: Batch) -> None:
    """Take `window` with an interruption before it or in the middle of it."""
    right, middle = arm.recipe, len(arm.recipe.split(len(window))) // 2

    def end(own: Arm) -> None:
        if own.position == middle and checkpoint.replays_window:
            raise Killed
        if own.position == middle:
            resume(setting, own, with_gradients=checkpoint.keeps_gradients)

    if checkpoint.in_window:
        arm.recipe = dataclasses.replace(right, before_micro_batch=(end,))
    else:
        resume(setting, arm, with_gradients=False)
    try:
        take_step(arm, window)
    except Killed:
        arm.recipe = right
        resume(setting, arm, with_gradients=False)
        take_step(arm, window)
    arm.recipe = right


def resume(setting: Setting, arm: Arm, *, with_gradients: bool) -> None:
    """Write a checkpoint as trainers do, and go on with new objects that are loaded from it.

    Args:
        setting: The trial's task, initial weights and windows.
        arm: The arm that goes on.
        with_gradients: Whether the checkpoint has them.
    """
    file = io.BytesIO()
    parts = ("model", "optimizer", "schedule", "scaler")
    saved = {name: getattr(arm, name).state_dict() for name in parts}
    if with_gradients:
        saved["gradients"] = [p.grad for p in arm.model.parameters()]
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file)
    fresh = setting.arm(arm.recipe)
    for name in parts:
        getattr(fresh, name).load_state_dict(loaded[name])
        setattr(arm, name, getattr(fresh, name))
    if with_gradients:
        for p, gradient in zip(arm.model.parameters(), loaded["gradients"], strict=True):
            p.grad = gradient


def identical(a: Arm, b: Arm) -> bool:
    """Whether weights, optimizer state and learning rate of two arms are the same, bit by bit.

    Args:
        a: An arm.
        b: Another.

    Returns:
        True where no bit differs.
    """
    one, two = ({"weights": flatten(arm.model.parameters()), **optimizer_state(arm.optimizer, arm.model.parameters())}
                for arm in (a, b))  # fmt: skip
    rates = {float(arm.optimizer.param_groups[0]["lr"]) for arm in (a, b)}
    return len(rates) == 1 and one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
