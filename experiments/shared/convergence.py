"""Where training ends: every arm trained on the same windows from the same weights, and nothing measured on the way but the loss.

L4 of docs/equivalence.md alone: it costs the bare training, so that many seeds and learning rates can be afforded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from accumulation_harness.config import ConfigError, Precision, TrialConfig
from accumulation_harness.config.arm_name import FULL, ArmName
from accumulation_harness.measure.lock_step import ArmChanges, Setting, Watch
from accumulation_harness.measure.training import OnStep, Row, outcome
from accumulation_harness.measure.trial import Candidate, full_batch, with_faults
from accumulation_harness.recipes import catalogue
from accumulation_harness.recipes.recipe import Arm, Recipe, evaluated, take_step
from accumulation_harness.recipes.remedies import batch_norms, calibrate
from accumulation_harness.referee.oracle import State
from accumulation_harness.workloads import Batch


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Train the full batch, every N, the permuted full batch (the null), and the faults that are asked for.

    Args:
        setting: The trial.
        on_step: Called with the step's number and a row for each arm.

    Returns:
        One row per arm: the `outcome` after the configured steps, per loss term and in nats, and under BatchNorm
        (`recalibrated_*`) the same weights with the training set's statistics, and `values_per_channel`.
    """
    config = setting.config
    wrong = {name: catalogue.named(name, config.precision) for name in catalogue.names(config)}
    ends = train(setting, trainings(setting, [Candidate(FULL, full_batch(config)), *with_faults(config, wrong)]), on_step)
    sizes = [max(end.arm.recipe.split(config.effective_batch)) for end in ends]
    values = {size: values_per_channel(setting, size) for size in set(sizes)} if setting.has_batch_norm else {}
    return [
        {
            **end.name.columns,
            "micro_batch": size,
            "samples": end.samples,
            **vars(outcome(end.arm, end.losses)),
            **({**recalibrated(setting, end.arm), "values_per_channel": values[size]} if values else {}),
        }
        for end, size in zip(ends, sizes, strict=True)
    ]


def values_per_channel(setting: Setting, micro_batch: int) -> int:
    """b H W: how many values of a channel a micro-batch of b samples has, in the BatchNorm layer that has the fewest.

    Args:
        setting: The trial's task, initial weights and windows.
        micro_batch: b.

    Returns:
        The number.
    """
    arm = setting.arm(full_batch(setting.config))
    seen: list[int] = []
    for layer in batch_norms(arm.model):
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel() // inputs[0].shape[1]))
    with evaluated(arm), torch.no_grad():
        arm.workload.forward(arm.model, arm.workload.batch(torch.arange(micro_batch)))
    return min(seen)


def recalibrated(setting: Setting, arm: Arm) -> Row:
    """Held-out loss and accuracy of an arm's weights with running statistics of the training set (precise BatchNorm).

    Args:
        setting: The trial's task, initial weights and windows.
        arm: A trained arm, which is not changed.

    Returns:
        Columns `recalibrated_*`.
    """
    plain = with_weights_of(setting, arm)
    calibrate(plain, torch.arange(plain.workload.num_samples))
    again = vars(outcome(plain, [math.nan]))
    return {f"recalibrated_{name}": value for name, value in again.items() if name.startswith("held_out")}


def with_weights_of(setting: Setting, arm: Arm) -> Arm:
    """Make a fresh arm of the model as it is, with the weights and statistics of another.

    Args:
        setting: The trial's task, initial weights and windows.
        arm: A trained arm, whose layers may have been exchanged.

    Returns:
        The arm, at the trained weights.
    """
    plain = setting.arm(full_batch(setting.config))
    plain.model.load_state_dict(arm.model.state_dict())
    return plain


@dataclass(eq=False)
class Training:
    """An arm in training, by the name that its rows have."""

    name: ArmName
    arm: Arm
    losses: list[float] = field(default_factory=list)  # of its windows
    seconds: list[float] = field(default_factory=list)  # inside its steps
    samples: int = 0

    def before(self, t: int, window: Batch) -> None:
        """What is done before a window, and not timed."""

    def take(self, window: Batch) -> float:
        """A window, and its loss."""
        return float(take_step(self.arm, window))  # which waits for a GPU


Trained = TypeVar("Trained", bound=Training)


def trainings(setting: Setting, chosen: Iterable[Candidate]) -> list[Training]:
    """Prepare the trainings, each at the initial weights.

    Args:
        setting: The trial's task, initial weights and windows.
        chosen: Names and recipes.

    Returns:
        The trainings.
    """
    return [Training(one.name, setting.arm(one.recipe)) for one in chosen]


def train(
    setting: Setting,
    arms: Sequence[Trained],
    on_step: OnStep,
    stream: Iterable[Tensor] | None = None,
    look: Callable[[int, Trained], Row] = lambda t, one: {},
) -> Sequence[Trained]:
    """Train arms side by side on the same windows, with the same draws.

    Args:
        setting: The trial.
        arms: What is trained.
        on_step: Called with the step's number and a row for each arm: its name, step, samples and loss, and what `look` sees.
        stream: Sample ids of each window; the trial's own unless given.
        look: Called after the window with the step's number and the arm: further columns.

    Returns:
        The arms, trained.
    """
    for t, ids in enumerate(setting.windows() if stream is None else stream):
        window, rows = arms[0].arm.workload.batch(ids), {}
        for one in (*arms[t % len(arms) :], *arms[: t % len(arms)]):  # none is always first, and so the coldest
            one.before(t, window)
            one.samples += len(ids)
            with setting.randomness(t):
                started = time.perf_counter()
                one.losses.append(one.take(window))
                one.seconds.append(time.perf_counter() - started)
            row = {**one.name.columns, "step": t, "samples": one.samples, "loss": one.losses[-1]}
            rows[one.name] = {**row, **look(t, one)}
        on_step(t, [rows[one.name] for one in arms])
    return arms


def consumed(
    setting: Setting, recipe: Recipe, window: Batch, *stream: int, state: State | None = None, **changes: Unpack[ArmChanges]
) -> Tensor:
    """Compute what the optimizer of a fresh float64 arm consumes of the window, from a `state` of the model where it is given.

    Args:
        setting: The trial's task, initial weights and windows.
        recipe: The recipe of the arm.
        window: Its samples.
        stream: Which draws the arm makes.
        state: Weights and buffers of the model; None: the initial ones.
        changes: Further settings of the arm.

    Returns:
        [P] gradient, unscaled and clipped.
    """
    own: ArmChanges = {"precision": Precision.float64, "steps": 1, **changes}
    arm = setting.arm(recipe, **own)
    if state is not None:
        arm.model.load_state_dict(state)
    watch = Watch(arm)
    with setting.randomness(*stream):
        take_step(arm, window)
    assert watch.gradient is not None
    return watch.gradient


def chosen_arms(config: TrialConfig, arms: Sequence[ArmName]) -> Sequence[ArmName]:
    """Choose all arms, or the `trained_arm` of the configuration.

    Args:
        config: The trial.
        arms: All that the study has.

    Returns:
        Some of them.

    Raises:
        ConfigError: `trained_arm` is none of them.
    """
    if config.trained_arm is None:
        return arms
    if config.trained_arm not in map(str, arms):
        raise ConfigError("trained_arm", config.trained_arm, f"one of {', '.join(map(str, arms))}")
    return [ArmName.parse(config.trained_arm)]
