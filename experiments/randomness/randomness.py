"""Dropout under accumulation: the gradient of one window over many draws of masks, in float64 at the initial weights.

Two questions: is a single draw the full batch's, from the same generator state; and is the distribution of the draws the same.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from accumulation_harness.experiments.shared.convergence import consumed
from accumulation_harness.experiments.shared.measuring import (
    OnStep,
    Recipe,
    Row,
    Setting,
    accumulated,
    full_batch,
    relative_distance,
)
from accumulation_harness.recipes.sample_masks import masks_of_samples, masks_repeated
from accumulation_harness.workloads.layers import replace_layers

SAME, OTHER = 5, 6  # streams of the trial's seed
REALISATIONS: dict[str, Callable[[Recipe], Recipe]] = {
    "accumulated": lambda recipe: recipe,
    "masks_of_samples": masks_of_samples,
    "masks_repeated": masks_repeated,
}


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Compare ways of drawing dropout masks with the full batch's draws.

    The configured model has one dropout layer, before its last; then it gets one behind every ReLU.

    Args:
        setting: The trial.
        on_step: Not called.

    Returns:
        One row per number of dropout layers, N and way of drawing masks.
    """
    config = setting.config
    right = [accumulated(config, num) for num in config.accumulation_steps]
    rows = _rows(setting, right)
    _drop_behind_relu(setting.initial, config.workload.dropout)
    return rows + _rows(setting, right)


def _rows(setting: Setting, right: Sequence[Recipe]) -> list[Row]:
    config = setting.config
    ids = next(setting.windows())
    full = full_batch(config)
    usual, other = draws(setting, full, ids, SAME), draws(setting, full, ids, OTHER)
    remedied = draws(setting, masks_of_samples(full), ids, SAME)
    layers = sum(isinstance(layer, nn.Dropout) for layer in setting.initial.modules())
    rows = []
    for recipe, (name, change) in itertools.product(right, REALISATIONS.items()):
        own = draws(setting, change(recipe), ids, SAME)
        rows.append({
            "dropout_layers": layers, "accumulation_steps": recipe.accumulation_steps, "masks": name,
            **_draw_distances(own, remedied if name == "masks_of_samples" else usual), **distribution(own, other),
        })  # fmt: skip
    return rows


def _drop_behind_relu(model: nn.Module, p: float) -> None:
    """Each ReLU is followed by dropout; parameters keep their values, not their names."""
    replace_layers(model, nn.ReLU, lambda layer: nn.Sequential(layer, nn.Dropout(p)))


def draws(setting: Setting, recipe: Recipe, ids: Tensor, stream: int) -> Tensor:
    """Compute the window's gradient under R draws; the r-th of a stream starts every recipe from the same state.

    Args:
        setting: The trial's task, initial weights and windows.
        recipe: The recipe of the arm.
        ids: [n] numbers of the window's samples.
        stream: Which draws.

    Returns:
        [R, P] gradients in float64, of the mean loss over the window's terms.
    """
    window = setting.exact.batch(ids)
    found = [consumed(setting, recipe, window, stream, r, clip_norm=None) for r in range(setting.config.permutations)]
    return torch.stack(found)


def _draw_distances(own: Tensor, full: Tensor) -> Row:
    """Relative distances ||a_r - g_r|| / ||g_r|| of the arm's and the full batch's r-th draw ([R, P] each)."""
    distances = [relative_distance(a, b) for a, b in zip(own, full, strict=True)]
    return {"draws": len(own), "distance": statistics.median(distances), "largest_distance": max(distances)}


def distribution(own: Tensor, full: Tensor) -> Row:
    """Compare means and spreads of draws with independent draws of the full batch.

    Args:
        own: [R, P] gradients under R draws.
        full: [R, P] the full batch's.

    Returns:
        `mean_shift`: R |mean(own - full)|^2 / tr Cov(own - full), of expectation 1 where the means are the same, larger
        elsewhere. `spread_ratio`: tr Cov(own) / tr Cov(full). `noise`: sqrt(tr Cov(full)) / |mean(full)|.
    """
    difference = own - full
    spread = full.var(0).sum()  # zero where the masks change nothing, as over units that are dead: ratios are NaN then
    return {
        "mean_shift": float(len(own) * difference.mean(0).square().sum() / difference.var(0).sum()),
        "spread_ratio": float(own.var(0).sum() / spread),
        "noise": float(spread**0.5 / full.mean(0).norm()),
    }
