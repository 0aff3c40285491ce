"""How training converges: loss on fixed samples over the samples, optimizer steps and seconds that it took, to a plateau.

A tenth of the training samples, by the trial's seed, is set aside for choosing learning rates; windows are of the others, and the
held-out samples are the test. Every arm sees the same windows in the same order: those that accumulate, and those that
take an optimizer step after every micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from accumulation_harness.config import TUNING_SEEDS, OptimizerConfig, State, state_of
from accumulation_harness.experiments.momentum.optimizer_states import same_memory, slower, small_batch
from accumulation_harness.experiments.shared.convergence import Training, chosen_arms, train
from accumulation_harness.experiments.shared.measuring import (
    FULL,
    HELD_OUT_BATCH,
    Arm,
    ArmName,
    Batch,
    OnStep,
    Row,
    Setting,
    accumulated,
    evaluated,
    evaluations,
    full_batch,
    standard_candidates,
)
from accumulation_harness.recipes import precision
from accumulation_harness.recipes.micro_batch import windows
from accumulation_harness.recipes.remedies import calibrate
from accumulation_harness.workloads.layers import has_batch_norm

POINTS = 50  # equal-sample points of a curve
PROBE, PROBE_TERMS = 1000, 20_000  # at most so many samples and loss terms, each of the probe and of the validation set
CALIBRATION = 2000  # training samples whose statistics BatchNorm is given before the second look at the end
SET_ASIDE = 10  # stream of the trial's seed
SMALL = "small_batch"  # a step after every micro-batch, the optimizer's memory as configured (per step)
SMALL_MEMORY = "small_batch_memory"  # the same with beta^(1/N): half-lives are those of the window, in samples


@dataclass(frozen=True)
class Samples:
    """Ids of a trial's training samples by what they are for."""

    training: Tensor  # [n] in the order they were drawn
    probe: Tensor  # the first of them
    validation: Tensor

    @classmethod
    def drawn(cls, setting: Setting) -> Samples:
        """A tenth set aside for validation."""
        order = torch.randperm(setting.exact.num_samples, generator=setting.generator(SET_ASIDE))
        validation, training = order.tensor_split([len(order) // 10])
        terms = setting.exact.num_terms(setting.exact.batch(training[:PROBE])).double().mean()
        num = max(1, min(PROBE, int(PROBE_TERMS / float(terms))))
        return cls(training, training[:num], validation[:num])

    def windows(self, setting: Setting) -> Iterator[Tensor]:
        """The trial's windows, of the training samples alone."""
        config = setting.config
        stream = windows(len(self.training), config.effective_batch, config.seed, config.data.last_window)
        return (self.training[places] for _, places in zip(range(config.steps), stream, strict=False))


@dataclass(eq=False)
class Course(Training):
    """A training with its curve; `small`: it steps after every micro-batch, under an `optimizer` of its own."""

    _: KW_ONLY
    optimizer: OptimizerConfig
    small: bool = False
    optimizer_steps: int = 0
    curve: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, window: Batch) -> float:
        """One window; its loss."""
        loss = super().take(window)
        self.optimizer_steps += len(self.arm.seen) if self.small else 1
        return loss

    def look(self, parts: Mapping[str, Batch]) -> Row:
        """Put a point on the curve: the losses on `parts`."""
        losses = {name: evaluation(self.arm, batch) for name, batch in parts.items()}
        seconds = sum(self.seconds)  # the evaluations are not counted
        point = {"samples": self.samples, "optimizer_steps": self.optimizer_steps, "seconds": seconds, **losses}
        for name, value in point.items():
            self.curve[f"curve_{name}"].append(value)
        return losses


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Train the full batch, its accumulation and small batches.

    Losses are nats per loss term, of the model as it is evaluated: `probe_loss` on the same training samples, at most 1,000,
    at every point, `validation_loss` on as many set aside, `test_loss` on the held-out samples at the end;
    `recalibrated_test_loss` after BatchNorm was given the statistics of 2,000 training samples.

    Args:
        setting: The trial.
        on_step: Called with the step's number and a row for each arm.

    Returns:
        One row per arm: its settings, its curve (`curve_*`: 51 values each, the first before training) and where it ended.
    """
    config = setting.config
    chosen = Samples.drawn(setting)
    courses = list(_courses(setting))
    points = {round(config.steps * (i + 1) / POINTS) - 1 for i in range(POINTS)}
    parts = {f"{name}_loss": courses[0].arm.workload.batch(ids)
             for name, ids in (("probe", chosen.probe), ("validation", chosen.validation))}  # fmt: skip
    for course in courses:
        course.look(parts)
    train(setting, courses, on_step, chosen.windows(setting), lambda t, course: course.look(parts) if t in points else {})
    return [_row(setting, course, chosen) for course in courses]


def _courses(setting: Setting) -> Iterator[Course]:
    """The full batch, every N, the permuted full batch, and for every N > 1 both kinds of small batch; or one `trained_arm`.

    Every N and the permuted full batch have the full batch's rate: they come with it, and are left out where rates are
    chosen.

    Yields:
        An arm with its optimizer.
    """
    config = setting.config
    changes = {ArmName(name, num): change for num in config.accumulation_steps if num > 1
               for name, change in ((SMALL, slower), (SMALL_MEMORY, same_memory))}  # fmt: skip
    trained = chosen_arms(config, (ArmName(FULL), *changes))
    if ArmName(FULL) in trained:
        yield Course(ArmName(FULL), setting.arm(full_batch(config)), optimizer=config.optimizer)
        for candidate in standard_candidates(config) if config.seed < TUNING_SEEDS else ():
            yield Course(candidate.name, setting.arm(candidate.recipe), optimizer=config.optimizer)
    for arm in (arm for arm in changes if arm in trained):
        num = arm.accumulation_steps
        optimizer = _with_small_rate(changes[arm](config.optimizer, num), config.optimizer.lr, num)
        yield Course(arm, _small_arm(setting, num, optimizer), optimizer=optimizer, small=True)


def _small_arm(setting: Setting, num: int, optimizer: OptimizerConfig) -> Arm:
    """An arm that steps after B / N samples. Its schedule moves once per window, as everyone's: equal samples, equal rate."""
    return setting.arm(small_batch(accumulated(setting.config, num)), optimizer=optimizer)


def _with_small_rate(optimizer: OptimizerConfig, lr: float, num: int) -> OptimizerConfig:
    """At lr / sqrt(N) under Adam, else as it is (lr / N): where one grid of rates holds the best of a batch of B / N as well."""
    return dataclasses.replace(optimizer, lr=lr / num**0.5) if state_of(optimizer.name) == State.moments else optimizer


def evaluation(arm: Arm, whole: Batch) -> float:
    """Compute the loss, sum over all samples / number of their loss terms, with the model as it is evaluated.

    Args:
        arm: A training arm, which is not changed.
        whole: Samples to evaluate on.

    Returns:
        Nats per loss term.
    """
    chunks = (whole.rows(slice(start, start + HELD_OUT_BATCH)) for start in range(0, len(whole), HELD_OUT_BATCH))
    return evaluations(arm, chunks)["loss"]


def _at_the_end(arm: Arm) -> dict[str, float]:
    """Loss and accuracy on the held-out samples, and what the task measures of a trained model."""
    found = evaluations(arm, arm.workload.held_out_batches(HELD_OUT_BATCH))
    with evaluated(arm), torch.no_grad(), precision.autocast(arm.precision, arm.device):
        return found | arm.workload.metrics(arm.model)


def arm_at(setting: Setting, num: int) -> Arm:
    """An arm that steps after B / N samples; its learning rate is lr / N, under Adam lr / sqrt(N).

    Args:
        setting: The trial's task, initial weights and windows.
        num: N.

    Returns:
        The arm.
    """
    config = setting.config
    if num == 1:
        return setting.arm(full_batch(config))
    return _small_arm(setting, num, _with_small_rate(slower(config.optimizer, num), config.optimizer.lr, num))


def _row(setting: Setting, course: Course, chosen: Samples) -> Row:
    config, arm = setting.config, course.arm
    ended = _at_the_end(arm)
    row = {
        **course.name.columns,
        "step_samples": max(arm.recipe.split(config.effective_batch)) if course.small else config.effective_batch,
        "rate": course.optimizer.lr,
        "samples": course.samples,
        **{f"test_{name}": value for name, value in ended.items()},
        "gap": ended["loss"] - course.curve["curve_probe_loss"][-1],
        **course.curve,
    }
    if has_batch_norm(arm.model):
        calibrate(arm, chosen.training[-CALIBRATION:])
        row["recalibrated_test_loss"] = _at_the_end(arm)["loss"]
    return row
