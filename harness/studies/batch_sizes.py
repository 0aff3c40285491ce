"""Training at several batch sizes on the same samples in the same order: the window of B, and a step after every B / N.

Nothing is measured on the way but the loss. The configured optimizer trains every size; the rules that carry a setting from one
batch size to another are applied by choosing among trials, which start from the same weights where they have the same seed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from harness.measure.lock_step import Setting
from harness.measure.training import OnStep, Row, outcome
from harness.recipes import precision
from harness.recipes.recipe import Arm, evaluated, take_step
from harness.studies.optimizer_states import small_batch
from harness.trial import accumulated
from harness.workloads import Batch

PROBE = 256  # training samples whose loss is followed along every training


@dataclass
class Training:
    """Training at B / N: an arm that steps after every micro-batch of a window."""

    num: int  # N
    arm: Arm
    enough: int  # optimizer steps that the window of B takes in all
    steps: int = 0
    losses: list[float] = field(default_factory=list)  # mean loss of every batch stepped on
    probe_losses: list[float] = field(default_factory=list)  # of the same samples after every window, whatever the batch
    window_losses: list[float] = field(default_factory=list)  # their mean over each window
    early: Row = field(default_factory=dict)  # `outcome` after as many steps as the window of B takes in all

    def count(self, arm: Arm) -> None:
        """Count an optimizer step; after the last that the window of B takes, evaluate."""
        self.steps += 1
        if self.steps == self.enough:
            self.early = vars(outcome(arm, [math.nan]))

    def note(self, contributions: Sequence[Tensor]) -> Tensor:
        """Keep the mean losses of a window's batches; the window's loss is their mean."""
        own = torch.stack(list(contributions))
        self.losses += own.tolist()
        self.window_losses.append(float(own.mean()))
        return own.mean()


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per batch size: B, and B / N for every N, each trained for `steps` windows.

    A step row has the mean loss over its window.
    """
    config = setting.config
    trainings = [_training(setting, num) for num in dict.fromkeys((1, *config.accumulation_steps))]
    probe, samples = torch.arange(min(PROBE, setting.exact.num_samples)), 0
    for t, ids in enumerate(setting.windows()):
        window = trainings[0].arm.workload.batch(ids)
        samples += len(ids)
        for one in trainings:
            with setting.randomness(t):
                take_step(one.arm, window)
            one.probe_losses.append(probed(one.arm, probe))
        on_step(t, [
            {"arm": "trained", "accumulation_steps": one.num, "step": t, "replicate": 0, "samples": samples,
             "loss": one.window_losses[-1], "probe_loss": one.probe_losses[-1]}
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
    """Where training ended at equal samples, and (`early_`) at equal steps; noise of the loss curve; nats per loss term."""
    return {
        "accumulation_steps": one.num,
        "batch": max(one.arm.recipe.split(effective_batch)),
        "samples": samples,
        "optimizer_steps": one.steps,
        **vars(outcome(one.arm, one.window_losses)),
        "early_held_out_loss": one.early["held_out_loss"],
        "early_held_out_accuracy": one.early["held_out_accuracy"],
        "step_noise": roughness(one.losses),
        "window_noise": roughness(one.window_losses),
        "probe_loss": one.probe_losses[-1],
        "probe_noise": detrended(one.probe_losses),
        "plateau_change": still_falling(one.probe_losses),
        **halves(one.arm),
    }


def probed(arm: Arm, ids: Tensor) -> float:
    """Mean loss per term of the training samples `ids` at the arm's weights, without dropout and with running statistics."""
    with evaluated(arm), torch.no_grad(), precision.autocast(arm.precision, arm.device):
        return mean_loss(arm, arm.workload.batch(ids))


def mean_loss(arm: Arm, batch: Batch) -> float:
    """Sum of the losses over the number of terms, as the arm's model stands."""
    losses = arm.workload.losses(arm.workload.forward(arm.model, batch), batch)
    return float(losses.double().sum() / arm.workload.num_terms(batch).sum())


def halves(arm: Arm) -> Row:
    """Loss on two halves of the held-out samples: one to choose a learning rate by, the other to judge what was chosen."""
    held = arm.workload.held_out
    middle = len(held) // 2
    with evaluated(arm), torch.no_grad(), precision.autocast(arm.precision, arm.device):
        parts = (held.rows(slice(0, middle)), held.rows(slice(middle, None)))
        return {f"{name}_loss": mean_loss(arm, part) for name, part in zip(("tuning", "judged"), parts, strict=True)}


def detrended(losses: Sequence[float]) -> float:
    """sqrt(mean of squared second differences / 6) over the second half: white noise's deviation, blind to any linear trend."""
    half = list(losses[len(losses) // 2 :])
    bends = [(a - 2 * b + c) ** 2 for a, b, c in zip(half, half[1:], half[2:], strict=False)]
    return math.sqrt(fmean(bends) / 6) if bends else math.nan


def still_falling(losses: Sequence[float]) -> float:
    """Relative change of the mean loss from the first to the second half of the last fifth: near 0 on a plateau."""
    last = list(losses[-max(2, len(losses) // 5) :])
    if len(last) < 2 or not fmean(last):
        return math.nan
    middle = len(last) // 2
    return abs(fmean(last[middle:]) / fmean(last[:middle]) - 1)


def roughness(losses: Sequence[float]) -> float:
    """sqrt(mean of squared differences of successive values / 2) over the second half: the standard deviation of white noise."""
    half = list(losses[len(losses) // 2 :])
    changes = [(after - before) ** 2 for before, after in itertools.pairwise(half)]
    return math.sqrt(fmean(changes) / 2) if changes else math.nan
