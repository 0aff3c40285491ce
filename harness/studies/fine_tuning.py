"""Training goes on from a trained model: with BatchNorm as it is, and with the statistics that the model has, frozen.

The model is trained with the full batch first. From its weights and statistics every arm trains again, as long, on the same
windows, with a fresh optimizer and schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor

from harness.measure.lock_step import Setting
from harness.measure.training import OnStep, Row, outcome
from harness.recipes.recipe import Arm, Recipe
from harness.recipes.remedies import batch_norms, before
from harness.results.arm_name import ACCUMULATED, FULL
from harness.studies.convergence import End, recalibrated, train
from harness.trial import Candidate, accumulated, full_batch, split_plan

TRAINED = "trained"  # the model that the others start from
FROZEN = "frozen_statistics"
FROZEN_FULL = "frozen_full_batch"


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per arm: the trained model, the full batch from there, and every N with moving and with frozen statistics.

    Each has the `outcome` and, under moving statistics, that with the training set's (`recalibrated_*`).
    """
    config = setting.config
    full = full_batch(config)
    (trained,) = train(setting, [Candidate(TRAINED, full)], lambda step, rows: None)
    state = copy.deepcopy(trained.arm.model.state_dict())
    start, frozen = going_on(state, keep), going_on(state, freeze)
    nums = config.accumulation_steps
    chosen = [Candidate(FULL, start(full)), Candidate(FROZEN_FULL, frozen(full))]
    for num in nums:
        right = accumulated(config, num)
        chosen += [Candidate(ACCUMULATED, start(right)), Candidate(FROZEN, frozen(right))]
    return [_row(setting, end) for end in (trained, *train(setting, chosen, on_step))]


def going_on(state: dict[str, Tensor], treat: Callable[[Arm], None]) -> Callable[[Recipe], Recipe]:
    """A recipe that starts from `state`, and treats its BatchNorm layers at every window."""

    def stage(arm: Arm) -> None:
        if not arm.windows:
            arm.model.load_state_dict(state)
        treat(arm)

    return lambda recipe: before(recipe, stage)


def keep(arm: Arm) -> None:
    """The layers as they are."""


def freeze(arm: Arm) -> None:
    """The statistics that the model has, for ever: BatchNorm becomes a fixed scale and shift."""
    for layer in batch_norms(arm.model):
        layer.eval()


def _row(setting: Setting, end: End) -> Row:
    config, recipe = setting.config, end.candidate.recipe
    return {
        "arm": end.candidate.arm,
        "accumulation_steps": recipe.accumulation_steps,
        "micro_batch": max(split_plan(config, recipe.accumulation_steps)(config.effective_batch)),
        "samples": end.samples,
        **vars(outcome(end.arm, end.losses)),
        **recalibrated(setting, end.arm),
    }
