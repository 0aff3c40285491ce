"""Loss scaling across a window: unscaled once, then clipped, updated once, and skipped whole when one micro-batch overflows.

Three windows: a healthy one, one with a sample whose output is infinite, and a healthy one again. Clipping is active, so that
the order of clipping and unscaling shows.
"""

from __future__ import annotations

import torch

from accumulation_harness.config import Precision
from accumulation_harness.experiments.shared.measuring import (
    FULL,
    PERMUTED,
    Arm,
    Candidate,
    OnStep,
    Recipe,
    Row,
    Setting,
    Watch,
    clipped,
    flatten,
    full_batch,
    relative_distance,
    snapshot,
    take_step,
    with_faults,
)
from accumulation_harness.measure import poison
from accumulation_harness.measure.algebra import ACTIVE
from accumulation_harness.recipes import catalogue

PRECISIONS = (Precision.float64, Precision.float16)  # the scaler's algebra, exactly; and the real thing


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per arm (the full batch, every N, the faults that are asked for) and precision.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows with `arm`, `accumulation_steps`, `width`, the relative `error` of the gradient, `steps`, `steps_when_hit`,
        `scale_factor`, and whether the weights `moved`.
    """
    config = setting.config
    wrong = {name: catalogue.named(name, config.precision) for name in catalogue.names(config)}
    accumulated = [candidate for candidate in with_faults(config, wrong) if candidate.arm != PERMUTED]
    chosen = [Candidate(FULL, full_batch(config)), *accumulated]
    return [
        {
            "arm": one.arm,
            "accumulation_steps": one.recipe.accumulation_steps,
            "width": str(precision),
            **_three_windows(setting, one.recipe, precision),
        }
        for precision in PRECISIONS
        for one in chosen
    ]


def _three_windows(setting: Setting, recipe: Recipe, precision: Precision) -> Row:
    """What an arm did with the three windows; errors are relative distances to the clipped float64 gradient there."""
    healthy, hit, after = setting.windows(3)
    referee = setting.referee(dropout=False)
    first = referee.gradient(snapshot(referee.model), setting.exact.batch(healthy))
    threshold = ACTIVE * float(torch.linalg.vector_norm(first))
    arm = setting.arm(recipe, dropout=False, precision=precision, steps=3, clip_norm=threshold)
    watch = Watch(arm)
    error, steps = _healthy(setting, arm, watch, healthy)
    scale, weights = arm.scaler.get_scale(), flatten(arm.model.parameters())
    sample = arm.workload.batch(hit[len(hit) // 2 :][:1])
    with poison.poisoned([arm], sample):
        _take(setting, arm, watch, hit)
    row = {
        "error": error,
        "steps": steps,
        "steps_when_hit": watch.steps_in_window,
        "scale_factor": arm.scaler.get_scale() / scale,
        "moved": not torch.equal(flatten(arm.model.parameters()), weights),
    }
    row["error_after"], row["steps_after"] = _healthy(setting, arm, watch, after)
    return row


def _healthy(setting: Setting, arm: Arm, watch: Watch, ids: torch.Tensor) -> tuple[float, int]:
    """(error, optimizer steps) of a window without overflow; infinite where nothing finite was consumed."""
    referee = setting.referee(dropout=False)
    exact = clipped(referee.gradient(snapshot(arm.model), setting.exact.batch(ids)), arm.clip_norm)
    _take(setting, arm, watch, ids)
    if watch.gradient is None or not bool(watch.gradient.isfinite().all()) or not bool(exact.isfinite().all()):
        return float("inf"), watch.steps_in_window
    return relative_distance(watch.gradient, exact), watch.steps_in_window


def _take(setting: Setting, arm: Arm, watch: Watch, ids: torch.Tensor) -> None:
    watch.start_window()
    with setting.randomness(arm.windows):
        take_step(arm, arm.workload.batch(ids))
