"""Dropout whose masks belong to samples: the same however a window is cut, so that accumulation is the full batch again."""

from __future__ import annotations

import dataclasses
from itertools import count

import torch
from torch import Tensor, nn

from accumulation_harness.recipes.determinism import random_state, set_random_state
from accumulation_harness.recipes.micro_batch import hash_seed
from accumulation_harness.recipes.recipe import Arm, Recipe
from accumulation_harness.workloads.layers import replace_layers


class SampleDropout(nn.Module):
    """Inverted dropout; the mask of a row is drawn from (key, layer, sample id) alone (on the CPU, a generator each)."""

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p, self.layer, self.key = p, layer, 0
        self.ids: Tensor = torch.empty(0, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, ...] -> the same shape; its rows are in the order of `ids`."""
        if not self.training or self.p == 0:
            return x
        kept = torch.stack([self._draw(int(sample), x.shape[1:]) for sample in self.ids]) >= self.p
        return x * kept.to(x, non_blocking=True) / (1 - self.p)

    def _draw(self, sample: int, shape: torch.Size) -> Tensor:
        generator = torch.Generator().manual_seed(hash_seed(self.key, self.layer, sample))
        return torch.rand(shape, generator=generator)


def masks_of_samples(recipe: Recipe) -> Recipe:
    """Draw dropout masks by sample: every `nn.Dropout` becomes a `SampleDropout`.

    A sample then has the same mask in every split. The window's key is the only draw from the global generator.

    Args:
        recipe: Any recipe.

    Returns:
        The recipe with such masks.
    """

    def prepare(arm: Arm) -> None:
        if "dropouts" not in arm.memory:
            arm.memory["dropouts"] = _replace_dropout(arm.model)
        if arm.position == 0:
            arm.memory["key"] = int(torch.randint(2**62, ()))
        for layer in arm.memory["dropouts"]:
            layer.key, layer.ids = arm.memory["key"], arm.seen[arm.position]

    return dataclasses.replace(recipe, before_micro_batch=(prepare, *recipe.before_micro_batch))


def masks_repeated(recipe: Recipe) -> Recipe:
    """Plant the fault that puts the generators back before each micro-batch, so that all of a window have the same masks.

    Args:
        recipe: A right recipe.

    Returns:
        The wrong one.
    """

    def put_back(arm: Arm) -> None:
        if arm.position == 0:
            arm.memory["generator"] = random_state(arm.device)
        set_random_state(arm.memory["generator"], arm.device)

    return dataclasses.replace(recipe, before_micro_batch=(put_back, *recipe.before_micro_batch))


def _replace_dropout(model: nn.Module) -> list[SampleDropout]:
    """Put a `SampleDropout` in the place of each `nn.Dropout`, and give them in order."""
    number = count()
    return replace_layers(model, nn.Dropout, lambda layer: SampleDropout(layer.p, next(number)).train(layer.training))
