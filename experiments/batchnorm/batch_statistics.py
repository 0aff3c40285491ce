"""What BatchNorm's statistics do to one accumulated window, exactly: gradient, running statistics, and what remedies change.

In float64, from the same weights and buffers for every arm: the initial ones, and those after the configured steps of training
on the full batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from accumulation_harness.config import LastWindow, Precision
from accumulation_harness.experiments.shared.measuring import (
    ACCUMULATED,
    Arm,
    Batch,
    Inside,
    OnStep,
    Recipe,
    Referee,
    Row,
    Setting,
    State,
    Watch,
    full_batch,
    relative_distance,
    running_statistics,
    snapshot,
    standard_candidates,
    take_step,
)
from accumulation_harness.measure.banks import count_forwards
from accumulation_harness.recipes.remedies import REMEDIES, batch_norms

MOMENTA = (0.1, 0.01, 0.5)  # of the running statistics: PyTorch's default, and others for the formula
MOVING = (ACCUMULATED, "corrected_momentum")  # arms that are measured at every momentum
GHOST = Inside(statistics=True)
SHIFT = 1.0  # between the two starts of the running statistics whose distance is followed through a window


@dataclass(frozen=True)
class WindowStep:
    """One window taken by an arm."""

    gradient: Tensor  # [P], as the optimizer finds it
    statistics: Tensor  # running means and variances afterwards
    forwards: float  # samples that went through the model, over the window's


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per moment of the training (its start, and after `steps` steps on the full batch), N, arm and momentum.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows with `arm`, `accumulation_steps`, `micro_batch`, `after_steps`, `momentum`, relative errors of gradient and
        running statistics, and `forwards` (samples through the model over the window's).
    """
    config = setting.config
    arm = _arm(setting, full_batch(config))
    first, *rest = setting.windows(config.steps + 1, last=LastWindow.drop)  # effects of b, not of a remainder
    rows = _rows(setting, snapshot(arm.model), setting.exact.batch(first), 0)
    for ids in [first, *rest[:-1]]:
        take_step(arm, setting.exact.batch(ids))
    return rows + _rows(setting, snapshot(arm.model), setting.exact.batch(rest[-1]), config.steps)


def _rows(setting: Setting, state: State, window: Batch, after_steps: int) -> list[Row]:
    config, referee, rows = setting.config, setting.referee(), []
    remedies: dict[str, Callable[[Recipe], Recipe]] = {ACCUMULATED: lambda recipe: recipe}
    remedies |= REMEDIES if setting.has_batch_norm else {}
    whole = full_batch(config)
    full = _take_window(setting, whole, state, window, MOMENTA[0])
    for right in (candidate.recipe for candidate in standard_candidates(config) if candidate.arm == ACCUMULATED):
        plain = _take_window(setting, right, state, window, MOMENTA[0])
        for name, apply in remedies.items():
            at_one = _take_window(setting, apply(whole), state, window, MOMENTA[0])
            for momentum in MOMENTA if setting.has_batch_norm and name in MOVING else MOMENTA[:1]:
                own = _take_window(setting, apply(right), state, window, momentum)
                rows.append({
                    "arm": name,
                    "accumulation_steps": right.accumulation_steps,
                    "micro_batch": max(right.split(len(window))),
                    "after_steps": after_steps,
                    "momentum": momentum,
                    **_gradient(own, full, at_one, plain),
                    **(_statistics(setting, apply(right), state, window, own, momentum) if setting.has_batch_norm else {}),
                })  # fmt: skip
                if name == ACCUMULATED and momentum == MOMENTA[0]:
                    rows[-1] |= _oracle(referee, state, window, right, own)
                if setting.has_batch_norm and momentum == MOMENTA[0]:
                    rows[-1] |= _beside_full(own, full, state)
    return rows


def _gradient(own: WindowStep, full: WindowStep, at_one: WindowStep, plain: WindowStep) -> Row:
    """Relative L2 distances in float64: to the full batch's, to the same arm's at N = 1, to the plainly accumulated one."""
    return {
        "gradient_error": relative_distance(own.gradient, full.gradient),
        "split_error": relative_distance(own.gradient, at_one.gradient),
        "change": relative_distance(own.gradient, plain.gradient),
        "forwards": own.forwards,
    }


def _statistics(setting: Setting, recipe: Recipe, state: State, window: Batch, own: WindowStep, momentum: float) -> Row:
    """Effective momentum, from two starts: r_N(r) - r_N(r') = retention * (r - r'), as the update is affine in r.

    `influence`: what the start of the running statistics does to the gradient, relative.

    Returns:
        Both numbers.
    """
    shifted = {name: value + SHIFT if name.endswith(("running_mean", "running_var")) else value for name, value in state.items()}
    other = _take_window(setting, recipe, shifted, window, momentum)
    before = running_statistics(shifted) - running_statistics(state)
    retention = float(torch.linalg.vector_norm(other.statistics - own.statistics) / torch.linalg.vector_norm(before))
    return {
        "effective_momentum": 1 - retention,
        "influence": relative_distance(other.gradient, own.gradient),
    }


def _beside_full(own: WindowStep, full: WindowStep, state: State) -> Row:
    """Distance of the running statistics to the full batch's, relative to how far those moved: all, and the first layer's.

    Only the first layer's inputs are the same in both: behind it they have been normalised by other statistics.

    Returns:
        Both distances.
    """
    start = running_statistics(state)
    channels = next(len(value) for name, value in state.items() if name.endswith("running_mean"))
    moved, wanted = own.statistics - start, full.statistics - start
    first = slice(0, 2 * channels)  # a layer's mean, then its variance
    return {
        "statistics_error": relative_distance(moved, wanted),
        "first_statistics_error": relative_distance(moved[first], wanted[first]),
    }


def _oracle(referee: Referee, state: State, window: Batch, recipe: Recipe, own: WindowStep) -> Row:
    """Distance to the full batch under Ghost BatchNorm in the micro-batches' chunks: gradient, and running statistics.

    `oracle_floor`: how far the oracle's own gradient goes when every weight moves by one unit in the last place. Two samples
    with nearly the same value are a badly conditioned BatchNorm: what rounding does there is no matter of the algebra.

    Returns:
        Both distances, and the floor.
    """
    sizes = recipe.split(len(window))
    _, gradient, after = referee.within(state, window, sizes, GHOST)
    moved = {
        name: torch.nextafter(value, torch.full_like(value, torch.inf)) if name in referee.names else value
        for name, value in state.items()
    }
    return {
        "oracle_floor": relative_distance(referee.within(moved, window, sizes, GHOST)[1], gradient),
        "oracle_error": relative_distance(own.gradient, gradient),
        "oracle_statistics_error": relative_distance(own.statistics, after),
    }


def _arm(setting: Setting, recipe: Recipe) -> Arm:
    return setting.arm(recipe, precision=Precision.float64, clip_norm=None)


def _take_window(setting: Setting, recipe: Recipe, state: State, window: Batch, momentum: float) -> WindowStep:
    """A fresh arm at `state` takes the window by the loop under test."""
    arm = _arm(setting, recipe)
    arm.model.load_state_dict(state)
    for layer in batch_norms(arm.model):
        layer.momentum = momentum
    watch = Watch(arm)
    forwards = count_forwards(arm.model, lambda: take_step(arm, window))
    assert watch.gradient is not None
    return WindowStep(watch.gradient, running_statistics(snapshot(arm.model)), forwards / len(window))
