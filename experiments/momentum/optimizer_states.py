"""What optimizers remember, in float64, beside the full batch's: accumulated, reordered, and trained in small steps instead.

Every arm starts from the same weights and sees the same windows. Each has the arm it is held against: accumulated gradients the
full batch, another order of the micro-batches the usual order, small steps the full batch's one step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from accumulation_harness.config import OptimizerConfig, Precision, State, TrialConfig, state_of
from accumulation_harness.experiments.shared.measuring import (
    ACCUMULATED,
    FULL,
    PERMUTED,
    REFERENCE,
    ArmName,
    Batch,
    Candidate,
    LockStep,
    OnStep,
    Recipe,
    Row,
    Setting,
    accumulated,
    arm_state,
    flatten,
    full_batch,
    permuted,
    relative_distance,
    running_statistics,
)
from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.signature import worst
from accumulation_harness.recipes.faults import loss_not_divided, optimizer_state_per_micro_batch, step_every_micro_batch

REORDERED = "reordered"  # the same micro-batches in another order
PER_MICRO_BATCH = Cause.optimizer_state_per_micro_batch
SMALL = "small_steps"  # a step after every micro-batch, on its mean loss: training at batch b on the same samples
SMALL_REORDERED = "small_steps_reordered"
SMALL_RATE = "small_steps_rate"  # as far per sample as the window: learning rate divided by N
SMALL_MEMORY = "small_steps_memory"  # and remembering as many samples: beta^(1/N)
CHECKPOINTS = (1, 50)  # optimizer steps that are reported beside the last


def in_reverse(right: Recipe) -> Recipe:
    """The micro-batches of every window from the last to the first; each keeps its samples.

    Args:
        right: A right recipe.

    Returns:
        The recipe.
    """

    def arrange(window: Batch, _step: int) -> Batch:
        return window.rows(torch.cat(torch.arange(len(window)).split(right.split(len(window)))[::-1]))

    return dataclasses.replace(right, split=lambda size: right.split(size)[::-1], arrange=arrange)


@dataclass(frozen=True)
class ComparedArm:
    """An arm, the arm that it is compared with, and its optimizer where it is not the configured one."""

    candidate: Candidate
    against: ArmName
    optimizer: OptimizerConfig | None = None


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Train arms beside each other in float64.

    Args:
        setting: The trial.
        on_step: Called with the number of the last step before a checkpoint, and its rows.

    Returns:
        One row per arm and checkpoint, with the largest relative distances so far: of consumed gradients, optimizer state,
        parameters and running statistics to the arm that it is held against.
    """
    config = setting.config
    compared = {one.candidate.label: one for one in _compared_arms(config)}
    arms = {REFERENCE: setting.arm(full_batch(config), precision=Precision.float64)}
    for label, one in compared.items():
        optimizer = one.optimizer or config.optimizer
        arms[label] = setting.arm(one.candidate.recipe, precision=Precision.float64, optimizer=optimizer)
    lock = LockStep(arms, config.seed)
    largest: dict[str, dict[str, float]] = {label: {} for label in compared}
    found: list[Row] = []
    for t, ids in enumerate(setting.windows(), start=1):
        records = lock.step(ids)
        rows = []
        for label, one in compared.items():
            now = _errors(lock, label, str(one.against))
            largest[label] = {name: worst(largest[label].get(name, 0.0), value) for name, value in now.items()}
            own: Row = one.candidate.name.columns
            rows.append({**own, "step": t - 1, "loss": records[label].loss, **now})
            if t in (*CHECKPOINTS, config.steps):
                losses = {"loss": records[label].loss, "loss_against": records[str(one.against)].loss}
                own |= {"after_steps": t, **largest[label], **losses}
                found.append(own | {f"{name}_now": value for name, value in now.items()})
        on_step(t - 1, rows)
    return found


def _compared_arms(config: TrialConfig) -> Iterator[ComparedArm]:
    full = ArmName(FULL)
    yield ComparedArm(Candidate(PERMUTED, permuted(config, 0)), full)
    for num in config.accumulation_steps:
        right = accumulated(config, num)
        other_order = in_reverse(right)
        yield ComparedArm(Candidate(ACCUMULATED, right), full)
        yield ComparedArm(Candidate(REORDERED, other_order), ArmName(ACCUMULATED, num))
        yield ComparedArm(Candidate(PER_MICRO_BATCH, optimizer_state_per_micro_batch(right)), full)
        small, small_other_order = (small_batch(recipe) for recipe in (right, other_order))
        yield ComparedArm(Candidate(SMALL, small), full)
        yield ComparedArm(Candidate(SMALL_REORDERED, small_other_order), ArmName(SMALL, num))
        yield ComparedArm(Candidate(SMALL_RATE, small), full, slower(config.optimizer, num))
        yield ComparedArm(Candidate(SMALL_MEMORY, small), full, same_memory(config.optimizer, num))


def small_batch(right: Recipe) -> Recipe:
    """Training at batch b on the window's samples: a step after every micro-batch, on the micro-batch's own mean loss.

    Args:
        right: A right recipe.

    Returns:
        The recipe.
    """
    wrong = step_every_micro_batch(loss_not_divided(right))
    return dataclasses.replace(wrong, report=lambda contributions: torch.stack(list(contributions)).mean())


def slower(optimizer: OptimizerConfig, num: int) -> OptimizerConfig:
    """The learning rate divided by `num`: `num` steps then go as far as one did, at the same gradient.

    Args:
        optimizer: Its settings.
        num: N.

    Returns:
        Other settings.
    """
    return dataclasses.replace(optimizer, lr=optimizer.lr / num)


def same_memory(optimizer: OptimizerConfig, num: int) -> OptimizerConfig:
    """Keep half-lives the same in samples where a step sees 1/num as many: `slower`, and beta^(1/num).

    A constant gradient moves PyTorch's momentum by lr / (1 - mu) per step, which is kept; it moves Adam by lr.

    Args:
        optimizer: The settings of the large batch.
        num: How many times smaller the batch is.

    Returns:
        The settings of the small batch.
    """
    mu, root = optimizer.momentum, 1 / num
    lr = optimizer.lr / num
    if state_of(optimizer.name) == State.buffer:
        lr *= (1 - mu**root) / (1 - mu)
    return dataclasses.replace(optimizer, lr=lr, momentum=mu**root, beta1=optimizer.beta1**root, beta2=optimizer.beta2**root)


def _errors(lock: LockStep, label: str, against: str) -> dict[str, float]:
    """Relative distances of arm `label` to arm `against` after the present step.

    `state_error` is the largest over the entries of the state; NaN where the optimizer keeps none, and where a step was
    skipped.

    Returns:
        Names of distances -> values.
    """
    arms = [lock.arms[name] for name in (label, against)]
    a, g = (lock.watches[name].gradient for name in (label, against))
    state, other = map(arm_state, arms)
    assert state.keys() == other.keys()
    return {
        "gradient_error": math.nan if a is None or g is None else relative_distance(a, g),
        "state_error": max((relative_distance(value, other[name]) for name, value in state.items()), default=math.nan),
        "parameter_error": relative_distance(*(flatten(arm.model.parameters()) - lock.start for arm in arms)),
        "buffer_error": relative_distance(*(running_statistics(arm.model.state_dict()) for arm in arms)),
    }
