"""A gradient that is N times too large (F1: the division by N forgotten), through optimizer, weight decay and clipping.

In exact arithmetic it is the right gradient under other settings (`as_if_right`): the fault is hidden where those hardly matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from accumulation_harness.config import LastWindow, OptimizerConfig, OptimizerName, Precision
from accumulation_harness.experiments.shared.measuring import (
    ACCUMULATED,
    REFERENCE,
    LockStep,
    OnStep,
    Row,
    Setting,
    accumulated,
    clipped,
    flatten,
    full_batch,
    relative_distance,
    snapshot,
)
from accumulation_harness.judge.cause import Cause
from accumulation_harness.recipes.faults import loss_not_divided

UNDIVIDED = Cause.loss_not_divided
AS_IF = "as_if_right"


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per N: what the fault does to the first step, and to all.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows with `accumulation_steps`, `clipped_share` (of the steps), `loss` and `loss_undivided` (nats per loss term),
        and relative errors of the first update and of all.
    """
    return [_row(setting, num) for num in setting.config.accumulation_steps]


def as_if_right(optimizer: OptimizerConfig, clip_norm: float | None, num: int) -> tuple[OptimizerConfig, float | None]:
    """Find the settings under which the right gradient g makes the steps that num * g makes under the given ones.

    clip(num g, c) = num clip(g, c / num). Momentum is linear: the rate is num times as large, the decay of the weights not.
    Adam divides by the gradient's size: eps / num, and weight decay that is added to the gradient (not AdamW's) / num.

    Args:
        optimizer: The given settings.
        clip_norm: c; None without clipping.
        num: By which the gradient is too large.

    Returns:
        The optimizer's settings and the norm to clip to.
    """
    clip = None if clip_norm is None else clip_norm / num
    match optimizer.name:
        case OptimizerName.adam:
            return dataclasses.replace(optimizer, eps=optimizer.eps / num, weight_decay=optimizer.weight_decay / num), clip
        case OptimizerName.adamw:
            return dataclasses.replace(optimizer, eps=optimizer.eps / num), clip
        case _:
            return dataclasses.replace(optimizer, lr=optimizer.lr * num, weight_decay=optimizer.weight_decay / num), clip


def _row(setting: Setting, num: int) -> Row:
    """How far the fault's weights are from those of the right recipe, and of the right one under other settings, relative."""
    config = setting.config
    right = accumulated(config, num)
    optimizer, clip_norm = as_if_right(config.optimizer, config.clip_norm, num)
    exact = Precision.float64
    arms = {
        REFERENCE: setting.arm(full_batch(config), precision=exact),
        ACCUMULATED: setting.arm(right, precision=exact),
        UNDIVIDED: setting.arm(loss_not_divided(right), precision=exact),
        AS_IF: setting.arm(right, precision=exact, clip_norm=clip_norm, optimizer=optimizer),
    }
    lock = LockStep(arms, config.seed)
    # Full windows alone: in a short one the fault's factor is the number of its own micro-batches.
    first: Mapping[str, float] = {}
    for ids in setting.windows(last=LastWindow.drop):
        records = lock.step(ids)
        first = first or {f"{name}_first": value for name, value in _differences(lock).items()}
    first_window = setting.exact.batch(next(setting.windows(last=LastWindow.drop)))
    gradient = setting.referee().gradient(snapshot(setting.initial), first_window)
    clips = arms[REFERENCE].clipped
    return {
        "accumulation_steps": num,
        **first,
        **_differences(lock),
        "predicted_first": predicted(config.optimizer, config.clip_norm, gradient, lock.start, num),
        "clipped_share": float(torch.stack(clips).double().mean()) if clips else 0.0,
        "loss": records[ACCUMULATED].loss,
        "loss_undivided": records[UNDIVIDED].loss / num,  # it reports the sum
    }


def _differences(lock: LockStep) -> dict[str, float]:
    """||a - b|| / ||b - start|| of the present weights, by the pair of arms that is compared."""
    weights = {name: flatten(arm.model.parameters()) for name, arm in lock.arms.items()}
    way = {name: value - lock.start for name, value in weights.items()}
    return {
        "right_error": relative_distance(way[ACCUMULATED], way[REFERENCE]),
        "fault_error": relative_distance(way[UNDIVIDED], way[REFERENCE]),
        "as_if_error": relative_distance(way[UNDIVIDED], way[AS_IF]),
    }


def predicted(optimizer: OptimizerConfig, clip_norm: float | None, gradient: Tensor, weights: Tensor, num: int) -> float:
    """||u(num g) - u(g)|| / ||u(g)|| of the first update u, in closed form.

    Args:
        optimizer: Its settings.
        clip_norm: Limit of the gradient's norm, or None.
        gradient: [P] g.
        weights: [P].
        num: Factor by which the fault multiplies the gradient.

    Returns:
        The relative change of the update.
    """
    right, wrong = (first_update(optimizer, clipped(factor * gradient, clip_norm), weights) for factor in (1, num))
    return relative_distance(wrong, right)


def first_update(optimizer: OptimizerConfig, gradient: Tensor, weights: Tensor) -> Tensor:
    """The first step over -lr: with the state at zero, Adam's bias-corrected moments are h and h^2 (Kingma & Ba, algorithm 1).

    Args:
        optimizer: Its settings.
        gradient: [P] g.
        weights: [P].

    Returns:
        [P] (before - after) / lr.
    """
    decayed = gradient + optimizer.weight_decay * weights
    match optimizer.name:
        case OptimizerName.adam:
            return decayed / (decayed.abs() + optimizer.eps)
        case OptimizerName.adamw:
            return gradient / (gradient.abs() + optimizer.eps) + optimizer.weight_decay * weights
        case OptimizerName.nesterov:
            return (1 + optimizer.momentum) * decayed
        case _:
            return decayed
