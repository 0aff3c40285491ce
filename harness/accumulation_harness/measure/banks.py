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
    """Largest relative distance of a bank's gradients to the exact oracle until `num` windows had it in use, in float64.

    NaN where there is no oracle: dropout, a penalty, pairs that come without towers.
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
    """A window taken by a method, without a step of the optimizer."""

    gradient: Tensor  # [P]
    loss: float
    forwards: float  # samples that went through the towers, over the window's


def reading(recipe: Recipe) -> Recipe:
    """The recipe with its gradient read and dropped in place of a step; dropout's masks belong to samples."""

    def read(arm: Arm) -> None:
        arm.memory["consumed"] = flatten(gradients(arm.model.parameters()))

    return dataclasses.replace(masks_of_samples(recipe), at_boundary=(read, clear))


def count_forwards(model: nn.Module, take: Any) -> int:
    """Samples that go through `model`, or a copy of it, while `take()` runs."""
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
    """The window at the reference's weights, with the arm's own way to take it."""
    arm.model.load_state_dict(reference.model.state_dict())
    losses: list[float] = []
    with setting.randomness(t):
        num = count_forwards(arm.model, lambda: losses.append(float(take_step(arm, window))))
    return WindowStep(arm.memory.pop("consumed"), losses[0], num / len(window))


def oracle_row(
    model: nn.Module, method: str, recipe: Recipe, window: Batch, own: WindowStep, past: negatives.Past | None, setting: Setting
) -> Row:
    """The distance to the exact oracle of what the method computes, where there is one."""
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
    """What the bank of a method of that name is to hold; None where it has none."""
    bank = contrastive.bank_named(method)
    if bank is None:
        return None
    decay = contrastive.DECAY if bank.has_momentum else None
    return negatives.Past(bank.size, has_queries=bank.has_queries, decay=decay, since=bank.since)
