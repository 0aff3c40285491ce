"""How far one optimizer step moves the weights, over the number of micro-batches of one size that were accumulated for it."""

from __future__ import annotations

import torch

from accumulation_harness.config import LastWindow, Precision
from accumulation_harness.experiments.shared.measuring import OnStep, Recipe, Row, Setting, flatten, take_step
from accumulation_harness.judge.cause import Cause
from accumulation_harness.recipes import faults
from accumulation_harness.recipes.micro_batch import Even

UNDIVIDED = Cause.loss_not_divided


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Measure the size of updates in float64.

    Micro-batches have b = B / max N samples, so that N of them are an effective batch of N·b.

    Args:
        setting: The trial.
        on_step: Not called.

    Returns:
        One row per N and arm (`accumulated`, and `loss_not_divided`), N = 1 among them.
    """
    config = setting.config
    size = config.effective_batch // max(config.accumulation_steps)
    rows = []
    for num in (1, *config.accumulation_steps):
        right = Recipe(accumulation_steps=num, split=Even(size))
        for arm, recipe in (("accumulated", right), (UNDIVIDED, faults.loss_not_divided(right))):
            first, later = _updates(setting, recipe, num * size)
            rows.append({"arm": arm, "accumulation_steps": num, "micro_batch": size, "first_update": first, "mean_update": later})
    return rows


def _updates(setting: Setting, recipe: Recipe, window_size: int) -> tuple[float, float]:
    """||theta_1 - theta_0||, and the mean of ||theta_t - theta_{t-1}|| over the configured steps."""
    arm = setting.arm(recipe, precision=Precision.float64)
    norms, before = [], flatten(arm.model.parameters())
    for ids in setting.windows(size=window_size, last=LastWindow.drop):
        take_step(arm, arm.workload.batch(ids))
        after = flatten(arm.model.parameters())
        norms.append(float(torch.linalg.vector_norm(after - before)))
        before = after
    return norms[0], sum(norms) / len(norms)
