"""Windows of pairs taken by a method with other negatives than the full batch's, beside the exact oracle of what it computes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from accumulation_harness.config.arm_name import ACCUMULATED
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.training import Row
from accumulation_harness.recipes import contrastive
from accumulation_harness.recipes.recipe import Arm, Recipe, clear, take_step
from accumulation_harness.recipes.sample_masks import masks_of_samples
from accumulation_harness.referee import negatives
from accumulation_harness.referee.gradients import flatten, gradients, relative_distance
from accumulation_harness.workloads import Batch
from accumulation_harness.workloads.docstrings import DocstringWorkload


def bank_error(setting: Setting, method: str, recipe: Recipe, full: Recipe, num: int) -> float:
    """Compare a bank's gradients with the exact oracle, in float64.

    Args:
        setting: The trial.
        method: The method's name, see `recipes.contrastive.bank_named`.
        recipe: The method's recipe.
        full: The full batch's recipe.
        num: How many windows must have had the bank in use.

    Returns:
        The largest relative distance; NaN where there is no oracle: dropout, a penalty, pairs that come without towers.
    """
    if not isinstance(setting.exact, DocstringWorkload) or setting.draws or setting.exact.penalty:
        return math.nan
    reference, arm = setting.arm(full), setting.arm(reading(recipe), clip_norm=None)
    errors, past = [], past_of(method)
    assert past is not None
    for t, ids in enumerate(setting.windows(past.since + num)):
        window = setting.exact.batch(ids)
        past.see(reference.model, window.inputs)
        own = taken(setting, arm, reference, window, t)
        errors.append(oracle_row(reference.model, method, recipe, window, own, past, setting)["oracle_error"])
        take_step(reference, window)
    return float(max(errors))


@dataclasses.dataclass(frozen=True)
class WindowStep:
    """A window as a method computed it, without a step of the optimizer."""

    gradient: Tensor  # [P]
    loss: float
    forwards: float  # samples that went through the towers, over the window's


def reading(recipe: Recipe) -> Recipe:
    """Change a recipe so that it reads and clears the gradient instead of stepping.

    Args:
        recipe: The recipe.

    Returns:
        The recipe that leaves the gradient in `arm.memory["consumed"]`; masks of dropout belong to samples.
    """

    def read(arm: Arm) -> None:
        arm.memory["consumed"] = flatten(gradients(arm.model.parameters()))

    return dataclasses.replace(masks_of_samples(recipe), at_boundary=(read, clear))


def count_forwards(model: nn.Module, take: Any) -> int:
    """Count the samples that go through a model.

    Args:
        model: The model; copies of its class count as well.
        take: Called without arguments; its forward passes are counted.

    Returns:
        The number of samples.
    """
    counted = [0]

    def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if type(module) is type(model):
            counted[0] += len(inputs[0])

    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        take()
    finally:
        handle.remove()
    return counted[0]


def taken(setting: Setting, arm: Arm, reference: Arm, window: Batch, t: int) -> WindowStep:
    """Compute a window with an arm's method at the weights of the reference.

    Args:
        setting: The setting of the trial.
        arm: The arm, with a recipe made by `reading`.
        reference: The arm whose weights are used.
        window: The window.
        t: Its number, which seeds the random draws.

    Returns:
        Gradient, loss, and forward passes per sample.
    """
    arm.model.load_state_dict(reference.model.state_dict())
    losses: list[float] = []
    with setting.randomness(t):
        num = count_forwards(arm.model, lambda: losses.append(float(take_step(arm, window))))
    return WindowStep(arm.memory.pop("consumed"), losses[0], num / len(window))


def oracle_row(
    model: nn.Module, method: str, recipe: Recipe, window: Batch, own: WindowStep, past: negatives.Past | None, setting: Setting
) -> Row:
    """Compare a method's gradient with an exact oracle of what the method is meant to compute.

    Args:
        model: The model at the weights of the window.
        method: Name of the method.
        recipe: Its recipe, which cuts the window.
        window: The window.
        own: What the method computed.
        past: What a memory bank is meant to hold; None without one.
        setting: The setting of the trial.

    Returns:
        `oracle_error` = ||a - o|| / ||o|| and `oracle_loss_error`, relative to the loss; empty if there is no oracle.
    """
    contrast, sizes = setting.config.workload.contrast, recipe.split(len(window))
    if past is not None:
        objective = negatives.beside_bank(sizes, contrast, past)
    elif method == ACCUMULATED:
        objective = negatives.within_blocks(sizes, contrast)
    elif method in contrastive.EXACT:
        objective = negatives.within_blocks([len(window)], contrast)
    else:
        return {}
    loss, gradient = negatives.gradient_of(model, window.inputs, objective)
    return {"oracle_error": relative_distance(own.gradient, gradient), "oracle_loss_error": abs(own.loss - loss) / abs(loss)}


def past_of(method: str) -> negatives.Past | None:
    """Return what the memory bank of a method is meant to hold.

    Args:
        method: Name of the method.

    Returns:
        An empty bank of its size; None if the method has no bank.
    """
    bank = contrastive.bank_named(method)
    if bank is None:
        return None
    decay = contrastive.DECAY if bank.has_momentum else None
    return negatives.Past(bank.size, has_queries=bank.has_queries, decay=decay, since=bank.since)
