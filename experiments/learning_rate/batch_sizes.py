"""Training at several batch sizes on the same samples in the same order: the window of B, and a step after every B / N.

Nothing is measured on the way but the loss. The configured optimizer trains every size; the rules that carry a setting from one
batch size to another are applied by choosing among trials, which start from the same weights where they have the same seed.
"""

from __future__ import annotations

from accumulation_harness.experiments.convergence.learning_curves import evaluation
from accumulation_harness.experiments.momentum.optimizer_states import small_batch
from accumulation_harness.experiments.shared.convergence import Training, train, trainings
from accumulation_harness.experiments.shared.measuring import Candidate, OnStep, Row, Setting, accumulated, outcome


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Train with batches of B, and of B / N for every N, each for `steps` windows, a step after every micro-batch.

    Args:
        setting: The trial.
        on_step: Called with the step's number and a row for each arm, with the mean loss over its window.

    Returns:
        One row per batch size.
    """
    config = setting.config
    chosen = [Candidate("trained", small_batch(accumulated(config, num))) for num in (1, *config.accumulation_steps)]
    ends = train(setting, trainings(setting, chosen), on_step)
    return [_row(end, config.effective_batch) for end in ends]


def _row(end: Training, effective_batch: int) -> Row:
    """Where training ended, at equal samples; nats per loss term.

    The held-out samples have two halves: one to choose a learning rate by, the other to judge what was chosen.

    Returns:
        The losses.
    """
    held = end.arm.workload.held_out
    middle = len(held) // 2
    return {
        "accumulation_steps": end.name.accumulation_steps,
        "batch": max(end.arm.recipe.split(effective_batch)),
        "samples": end.samples,
        **vars(outcome(end.arm, end.losses)),
        "tuning_loss": evaluation(end.arm, held.rows(slice(0, middle))),
        "judged_loss": evaluation(end.arm, held.rows(slice(middle, None))),
    }
