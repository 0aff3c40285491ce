"""Training at several batch sizes on the same samples in the same order: the window of B, and a step after every B / N.

Nothing is measured on the way but the loss. The configured optimizer trains every size; the rules that carry a setting from one
batch size to another are applied by choosing among trials, which start from the same weights where they have the same seed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from accumulation_harness.experiments.convergence.learning_curves import evaluation
from accumulation_harness.experiments.momentum.optimizer_states import small_batch
from accumulation_harness.experiments.shared.measuring import Arm, OnStep, Row, Setting, accumulated, outcome, take_step


@dataclass
class Training:
    """Training at B / N: an arm that steps after every micro-batch of a window."""

    num: int  # N
    arm: Arm
    enough: int  # optimizer steps that the window of B takes in all
    steps: int = 0
    window_losses: list[float] = field(default_factory=list)  # their mean over each window
    early: float = math.nan  # held-out loss after as many steps as the window of B takes in all

    def count(self, arm: Arm) -> None:
        """Count an optimizer step; after the last that the window of B takes, evaluate."""
        self.steps += 1
        if self.steps == self.enough:
            self.early = outcome(arm, [math.nan]).held_out_loss

    def note(self, contributions: Sequence[Tensor]) -> Tensor:
        """Keep the mean losses of a window's batches; the window's loss is their mean."""
        own = torch.stack(list(contributions))
        self.window_losses.append(float(own.mean()))
        return own.mean()


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per batch size: B, and B / N for every N, each trained for `steps` windows.

    A step row has the mean loss over its window.
    """
    config = setting.config
    trainings = [_training(setting, num) for num in dict.fromkeys((1, *config.accumulation_steps))]
    samples = 0
    for t, ids in enumerate(setting.windows()):
        window = trainings[0].arm.workload.batch(ids)
        samples += len(ids)
        for one in trainings:
            with setting.randomness(t):
                take_step(one.arm, window)
        on_step(t, [
            {"arm": "trained", "accumulation_steps": one.num, "step": t, "replicate": 0, "samples": samples,
             "loss": one.window_losses[-1]}
            for one in trainings
        ])  # fmt: skip
    return [_row(one, samples, config.effective_batch) for one in trainings]


def _training(setting: Setting, num: int) -> Training:
    config = setting.config
    right = accumulated(config, num)
    arm = setting.arm(right)
    training = Training(num, arm, config.steps)
    stepping = small_batch(right)
    arm.recipe = dataclasses.replace(stepping, after_backward=(*stepping.after_backward, training.count), report=training.note)
    return training


def _row(one: Training, samples: int, effective_batch: int) -> Row:
    """Where training ended at equal samples, and (`early_`) at equal steps; nats per loss term.

    The held-out samples have two halves: one to choose a learning rate by, the other to judge what was chosen.
    """
    held = one.arm.workload.held_out
    middle = len(held) // 2
    return {
        "accumulation_steps": one.num,
        "batch": max(one.arm.recipe.split(effective_batch)),
        "samples": samples,
        "optimizer_steps": one.steps,
        **vars(outcome(one.arm, one.window_losses)),
        "early_held_out_loss": one.early,
        "tuning_loss": evaluation(one.arm, held.rows(slice(0, middle))),
        "judged_loss": evaluation(one.arm, held.rows(slice(middle, None))),
    }
