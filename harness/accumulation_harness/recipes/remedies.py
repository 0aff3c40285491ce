"""What is done about BatchNorm under accumulation: each a function from a right recipe to another, and a named arm.

None of them is free of a price; `experiments/batchnorm.py` measures what each mends. GroupNorm and LayerNorm are models (`norm`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from accumulation_harness.config import ConfigError
from accumulation_harness.recipes import precision, two_pass
from accumulation_harness.recipes.recipe import Arm, Recipe, Stage
from accumulation_harness.recipes.two_pass import LossOf, WindowNorm
from accumulation_harness.system import pytree
from accumulation_harness.workloads import Batch
from accumulation_harness.workloads.layers import replace_layers

Transform = Callable[[Recipe], Recipe]


def corrected_momentum(recipe: Recipe) -> Recipe:
    """Momentum 1 - (1 - m)^(1/N) at each of a window's N micro-batches: then 1 - m of the old statistics is left after it.

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this remedy.
    """

    def correct(arm: Arm) -> None:
        usual = arm.memory.setdefault("momenta", [layer.momentum for layer in batch_norms(arm.model)])
        for layer, momentum in zip(batch_norms(arm.model), usual, strict=True):
            layer.momentum = 1 - (1 - momentum) ** (1 / len(arm.seen))

    return before(recipe, correct)


def window_statistics(recipe: Recipe) -> Recipe:
    """Running statistics move once for each window, by its micro-batches' statistics pooled (law of total variance).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this remedy.
    """

    def watch(arm: Arm) -> None:
        if "parts" not in arm.memory:
            arm.memory["parts"] = [(layer, layer.momentum, []) for layer in batch_norms(arm.model)]
            for layer, _, own in arm.memory["parts"]:
                layer.register_forward_pre_hook(lambda _layer, inputs, own=own: own.append(two_pass.moments(inputs[0])))
                layer.momentum = 0.0  # the layer itself leaves them alone

    def move(arm: Arm) -> None:
        for layer, momentum, own in arm.memory["parts"]:
            window = two_pass.pooled(own)
            layer.num_batches_tracked -= len(own) - 1
            layer.running_mean.lerp_(window.mean.to(layer.running_mean), momentum)
            layer.running_var.lerp_(window.unbiased.to(layer.running_var), momentum)
            own.clear()

    return dataclasses.replace(before(recipe, watch), at_boundary=(move, *recipe.at_boundary))


def frozen_statistics(recipe: Recipe) -> Recipe:
    """The statistics of the first window, for ever: BatchNorm becomes a fixed scale and shift.

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this remedy.
    """

    def settle(arm: Arm) -> None:
        if not arm.windows:
            calibrate(arm, torch.cat(arm.seen))

    return before(frozen(recipe), settle)


def frozen(recipe: Recipe) -> Recipe:
    """Train with the running statistics that the model has, which stay as they are.

    Args:
        recipe: Any recipe.

    Returns:
        The same with every BatchNorm layer in evaluation mode.
    """
    return before(recipe, lambda arm: freeze(arm.model))


def two_pass_statistics(recipe: Recipe) -> Recipe:
    """The window's statistics and the gradient through them, in two passes over the window for each layer: the full batch's.

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this remedy.
    """

    def settle(arm: Arm) -> None:
        order, loss_of = _statistics_passes(arm)
        two_pass.reduction_passes(order, loss_of, len(arm.seen))

    return before(recipe, settle)


def detached_statistics(recipe: Recipe) -> Recipe:
    """The window's statistics as constants: the statistics passes without the reduction passes.

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this remedy.
    """

    def settle(arm: Arm) -> None:
        _statistics_passes(arm)

    return before(recipe, settle)


def ghost_full_batch(recipe: Recipe) -> Recipe:
    """The full batch in one backward, normalised in chunks of b (Hoffer et al. 2017): a forward for each chunk in turn.

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this remedy.
    """

    def forward(arm: Arm, window: Batch) -> Any:
        edges = pairwise(accumulate(recipe.split(len(window)), initial=0))
        return pytree.joined([recipe.forward(arm, window.rows(slice(*edge))) for edge in edges])

    return dataclasses.replace(recipe, split=whole, forward=forward)


def before(recipe: Recipe, stage: Stage) -> Recipe:
    """Add a stage at the start of every window, when its micro-batches are known and none is computed.

    Args:
        recipe: Any recipe.
        stage: Called with the arm.

    Returns:
        The recipe with the stage before its own.
    """

    def at_start(arm: Arm) -> None:
        if arm.position == 0:
            stage(arm)

    return dataclasses.replace(recipe, before_micro_batch=(at_start, *recipe.before_micro_batch))


def whole(window_size: int) -> list[int]:
    """One micro-batch of everything.

    Args:
        window_size: Samples of the window.

    Returns:
        Its sizes.
    """
    return [window_size]


def freeze(model: nn.Module) -> None:
    """Put every BatchNorm layer into evaluation mode.

    Args:
        model: The model, in place.
    """
    for layer in batch_norms(model):
        layer.eval()


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Find the BatchNorm layers of a model.

    Args:
        model: The model.

    Returns:
        The layers, in the order of `modules()`.
    """
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]


def calibrate(arm: Arm, ids: Tensor) -> None:
    """Set the running statistics of every BatchNorm layer to those of given samples, by one forward in training mode.

    Args:
        arm: The arm whose model is calibrated, in place; it is in training mode afterwards.
        ids: [n] int64 ids of the samples.
    """
    model = arm.model
    momenta = [layer.momentum for layer in batch_norms(model)]
    model.train()
    for layer in batch_norms(model):
        layer.momentum = 1.0
    with torch.no_grad():
        arm.workload.forward(model, arm.workload.batch(ids))
    for layer, momentum in zip(batch_norms(model), momenta, strict=True):
        layer.momentum = momentum


def _statistics_passes(arm: Arm) -> tuple[list[WindowNorm], LossOf]:
    """Take the statistics passes over the window that begins.

    Returns:
        The layers in their order, and the contribution of micro-batch k to the window's loss.

    Raises:
        ConfigError: The model has dropout, of which a second pass would draw other masks.
    """
    if any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in arm.model.modules()):
        raise ConfigError("workload.dropout", "above 0", "0 with statistics of the window: a second pass would draw other masks")
    if not arm.windows:
        arm.memory["window norms"] = replace_layers(arm.model, _BatchNorm, WindowNorm)
    edges = pairwise(accumulate(map(len, arm.seen), initial=0))
    parts = arm.recipe.prepare(arm.workload, arm.workload.batch(torch.cat(arm.seen)), [slice(*edge) for edge in edges])
    terms = [arm.workload.num_terms(part).sum() for part in parts]
    normalisers = arm.recipe.normalise(terms, arm.recipe.accumulation_steps)

    def loss_of(k: int) -> Tensor:
        with precision.autocast(arm.precision, arm.device):
            outputs = arm.recipe.forward(arm, parts[k])
            loss = arm.workload.losses(outputs, parts[k]).sum() / normalisers[k]
        scaled: Tensor = arm.scaler.scale(loss)
        return scaled

    return two_pass.statistics_passes(arm.memory["window norms"], loss_of, len(parts)), loss_of


REMEDIES: dict[str, Transform] = {
    transform.__name__: transform
    for transform in (
        corrected_momentum, window_statistics, frozen_statistics, detached_statistics, two_pass_statistics, ghost_full_batch,
    )
}  # fmt: skip
