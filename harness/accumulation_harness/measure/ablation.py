"""Attribution by removal: run one window again without a factor, and see how much of the gap to the full batch it closes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accumulation_harness.config import Precision
from accumulation_harness.measure.lock_step import ArmChanges, Setting, Watch, tensors_of
from accumulation_harness.recipes.micro_batch import Even
from accumulation_harness.recipes.recipe import Recipe, take_step
from accumulation_harness.recipes.remedies import freeze
from accumulation_harness.referee.gradients import relative_distance
from accumulation_harness.referee.oracle import clipped, no_clipping, snapshot


@dataclass(frozen=True, kw_only=True)
class Run:
    """One window under the trial's own conditions, or with one of them removed."""

    recipe: Recipe
    ids: Tensor
    precision: Precision
    clip_norm: float | None
    dropout: bool = True
    frozen_statistics: bool = False


Removal = Callable[[Setting, Run], Run]


def _with_changes(**changes: Any) -> Removal:
    """The removal that makes these changes of a run."""
    return lambda setting, run: dataclasses.replace(run, **changes)


def _equal_lengths(setting: Setting, run: Run) -> Run:
    """A full window of samples with equally many loss terms, cut evenly."""
    workload, config, num = setting.exact, setting.config, run.recipe.accumulation_steps
    terms = workload.num_terms(workload.batch(torch.arange(workload.num_samples))).cpu()
    commonest = terms.mode().values
    alike = torch.nonzero(terms == commonest).flatten()
    micro_batch = max(1, min(config.effective_batch, len(alike)) // num)
    recipe = dataclasses.replace(run.recipe, split=Even(micro_batch))
    return dataclasses.replace(run, recipe=recipe, ids=alike[: micro_batch * num])


REMOVALS: dict[str, Removal] = {
    "batch statistics": _with_changes(frozen_statistics=True),  # BatchNorm normalises by its running statistics
    "dropout": _with_changes(dropout=False),
    "clipping": lambda setting, run: dataclasses.replace(run, clip_norm=no_clipping(run.clip_norm)),
    "low precision": _with_changes(precision=Precision.float64),
    "unequal lengths": _equal_lengths,
}


def attribute(setting: Setting, recipe: Recipe, windows: Sequence[Tensor]) -> Mapping[str, float]:
    """Attribute the gap of an arm in the precision under test to factors that can be removed.

    The gap is ||a - g|| / ||g|| of one consumed gradient against the float64 full batch under the same conditions, on the
    window where it is widest.

    Args:
        setting: The trial.
        recipe: The arm's.
        windows: Sample ids, [n] int64 each, of the windows that are tried.

    Returns:
        Factor -> share of the gap that its removal closes (1: all of it, 0: none; below 0: the gap grew). Empty when no
        single window shows a gap: the fault then needs several, or is no gradient's.
    """
    config = setting.config
    if setting.not_float64:
        return {}
    shared: dict[str, Any] = {"precision": config.precision, "clip_norm": config.clip_norm, "dropout": setting.masks_are_shared}
    runs = [Run(recipe=recipe, ids=ids, **shared) for ids in windows]
    gaps = [gap(setting, run) for run in runs]
    widest, whole = max(zip(runs, gaps, strict=True), key=lambda pair: -1.0 if math.isnan(pair[1]) else pair[1])
    if not whole > 0 or not math.isfinite(whole):
        return {}
    return {name: 1 - gap(setting, remove(setting, widest)) / whole for name, remove in REMOVALS.items()}


def gap(setting: Setting, run: Run) -> float:
    """||a - g|| / ||g|| of one window; NaN when the step was skipped.

    Args:
        setting: The trial's task, initial weights and windows.
        run: A recipe and the settings under which it takes one window.

    Returns:
        The relative distance of the arm's gradient a to the reference's g.
    """
    changes = ArmChanges(precision=run.precision, steps=1, clip_norm=run.clip_norm)
    arm = setting.arm(run.recipe, dropout=run.dropout, **changes)
    if run.frozen_statistics:
        freeze(arm.model)
    watch = Watch(arm)
    with setting.randomness():
        take_step(arm, arm.workload.batch(run.ids))
    if watch.gradient is None:
        return math.nan
    setting.offload.settle([*tensors_of(arm), watch.gradient])
    referee = setting.referee(dropout=run.dropout)
    if run.frozen_statistics:
        freeze(referee.model)
    with setting.randomness():
        exact = referee.gradient(snapshot(referee.model), setting.exact.batch(run.ids))
    return relative_distance(watch.gradient, clipped(exact, run.clip_norm))
