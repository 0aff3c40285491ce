"""What a step did, given the gradient it consumed: against a twin optimizer that starts from the same state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.gradients import flatten, relative_distance
from harness.lock_step import Setting, arm_state, optimizer_state
from harness.recipe import Arm, make_optimizer

WEIGHT_ROUNDING = 2.0**-50  # a few roundings of float64, relative


@dataclass(frozen=True)
class Before:
    """What an arm's optimizer and moving average carried when a window began."""

    entries: Mapping[str, Tensor]  # the optimizer's state, flat
    step: Tensor | None  # its own counter
    learning_rate: float
    ema: Tensor | None  # None before the first average

    @staticmethod
    def of(arm: Arm) -> Before:
        counters = [state["step"] for state in arm.optimizer.state.values() if "step" in state]
        started = arm.ema is not None and int(arm.ema.n_averaged) > 0
        return Before(
            entries=optimizer_state(arm.optimizer, arm.model.parameters()),
            step=counters[0].clone() if counters else None,
            learning_rate=arm.optimizer.param_groups[0]["lr"],
            ema=flatten(arm.ema.module.parameters()) if arm.ema is not None and started else None,
        )


@dataclass(frozen=True)
class Update:
    """A step's outcome beside that of a twin optimizer in the same state, given the same gradient at the same weights."""

    parameters: tuple[float, float]  # (error relative to the update, its cosine with the weights); zero within their rounding
    states: Mapping[str, float]  # relative errors of the entries of the optimizer's state and of the moving average


def check_update(setting: Setting, arm: Arm, consumed: Tensor, start: Tensor, before: Before) -> Update:
    """What the arm's optimizer made of the gradient it consumed. `start`: the weights before the step."""
    twin = torch.nn.Parameter(start.clone())
    optimizer = make_optimizer(setting.config.optimizer, [twin])
    optimizer.param_groups[0]["lr"] = before.learning_rate
    if before.entries or before.step is not None:
        optimizer.state[twin] = {name: value.clone() for name, value in before.entries.items()}
        if before.step is not None:
            optimizer.state[twin]["step"] = before.step.clone()
    twin.grad = consumed.clone()
    optimizer.step()
    expected, reached = twin.detach(), flatten(arm.model.parameters())
    moved = torch.linalg.vector_norm(expected - start)
    difference = reached - expected
    error = (0.0, 0.0)
    # Rounding of the weights themselves: it looks large beside a tiny update, at the end of a cosine schedule for example.
    if torch.linalg.vector_norm(difference) > WEIGHT_ROUNDING * torch.linalg.vector_norm(start):
        error = movement(difference, start, moved)
    states = optimizer_state(optimizer, [twin])
    if arm.ema is not None and setting.config.ema_decay is not None:
        decay = setting.config.ema_decay
        states["ema"] = reached if before.ema is None else decay * before.ema + (1 - decay) * reached
    return Update(error, entry_errors(arm_state(arm), states))


def size(pair: tuple[float, float]) -> float:
    """Of a movement and its direction, the movement; a NaN counts as the largest."""
    return math.inf if math.isnan(pair[0]) else pair[0]


def movement(difference: Tensor, along: Tensor, unit: Tensor) -> tuple[float, float]:
    """(||difference|| / unit, cosine of the difference with `along`)."""
    size = torch.linalg.vector_norm(difference)
    if size == 0:
        return 0.0, 0.0
    return float(size / unit), float(difference @ along / size / torch.linalg.vector_norm(along))


def entry_errors(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative distance of each entry of the optimizer's state; infinite where one of the two lacks it."""
    return {
        name: relative_distance(state[name], reference[name]) if name in state and name in reference else math.inf
        for name in state.keys() | reference.keys()
    }
