"""What remedies for BatchNorm do to where training ends: plain accumulation, and every remedy, beside the full batch.

Each arm is evaluated twice: with the running statistics that it kept, and with those of the whole training set at its weights.
What differs between the two is the running statistics' doing; what is left, the training's.
"""

from __future__ import annotations

from accumulation_harness.experiments.shared.convergence import Training, recalibrated, train, trainings, with_weights_of
from accumulation_harness.experiments.shared.measuring import (
    FULL,
    Candidate,
    OnStep,
    Row,
    Setting,
    full_batch,
    outcome,
    split_plan,
    with_faults,
)
from accumulation_harness.recipes.remedies import REMEDIES


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per arm: the full batch, plain accumulation at every N, the permuted full batch, and every remedy at every N.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows as those of `row`.
    """
    config = setting.config
    ends = train(setting, trainings(setting, [Candidate(FULL, full_batch(config)), *with_faults(config, REMEDIES)]), on_step)
    return [row(setting, end) for end in ends]


def row(setting: Setting, end: Training) -> Row:
    """`outcome` with the running statistics that were kept, and (`recalibrated_*`) with those of the training set.

    Args:
        setting: The trial's task, initial weights and windows.
        end: A training that has ended.

    Returns:
        The arm's name, `micro_batch`, `samples`, and the columns of `outcome`, each also as `recalibrated_*`.
    """
    config = setting.config
    return {
        **end.name.columns,
        "micro_batch": max(split_plan(config, end.name.accumulation_steps)(config.effective_batch)),
        "samples": end.samples,
        **vars(outcome(with_weights_of(setting, end.arm), end.losses)),
        **recalibrated(setting, end.arm),
    }
