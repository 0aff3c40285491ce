"""Training goes on from a trained model: with BatchNorm as it is, and with the statistics that the model has, frozen.

The model is trained with the full batch first. From its weights and statistics every arm trains again, as long, on the same
windows, with a fresh optimizer and schedule.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from accumulation_harness.experiments.batchnorm.remedies import row
from accumulation_harness.experiments.shared.convergence import train, trainings
from accumulation_harness.experiments.shared.measuring import (
    ACCUMULATED,
    FULL,
    Arm,
    Candidate,
    OnStep,
    Recipe,
    Row,
    Setting,
    accumulated,
    full_batch,
)
from accumulation_harness.recipes.remedies import before, frozen

TRAINED = "trained"  # the model that the others start from
FROZEN = "frozen_statistics"
FROZEN_FULL = "frozen_full_batch"


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per arm, as `remedies` has it: the trained model; from there the full batch and every N, moving and frozen.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows as those of `remedies.row`.
    """
    config = setting.config
    full = full_batch(config)
    (trained,) = train(setting, trainings(setting, [Candidate(TRAINED, full)]), lambda step, rows: None)
    chosen = [Candidate(FULL, full), Candidate(FROZEN_FULL, frozen(full))]
    for right in (accumulated(config, num) for num in config.accumulation_steps):
        chosen += [Candidate(ACCUMULATED, right), Candidate(FROZEN, frozen(right))]
    start = _going_on(trained.arm.model.state_dict())
    ends = train(setting, trainings(setting, [Candidate(one.arm, start(one.recipe)) for one in chosen]), on_step)
    return [row(setting, end) for end in (trained, *ends)]


def _going_on(state: dict[str, Tensor]) -> Callable[[Recipe], Recipe]:
    """A recipe that starts from these weights and statistics."""

    def load(arm: Arm) -> None:
        if not arm.windows:
            arm.model.load_state_dict(state)

    return lambda recipe: before(recipe, load)
