"""Loops as everyone writes them: the right ones are equivalent, the wrong ones are named from the evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.by_hand import recognised
from harness.config import OptimizerConfig, OptimizerName, Precision, Split, TrialConfig, WorkloadConfig
from harness.recipe import Arm
from harness.trial import judge_loop
from harness.workloads import Batch
from tests.toy import Toy

CONFIG = TrialConfig(
    accumulation_steps=(4,), effective_batch=32, steps=1, algebra_steps=4, workload=WorkloadConfig(width=2),
    optimizer=OptimizerConfig(name=OptimizerName.momentum, lr=0.05),
)  # fmt: skip


def micro_batches(window: Batch) -> list[Batch]:
    return [window.rows(slice(k, k + 8)) for k in range(0, len(window), 8)]


def usual(arm: Arm, window: Batch) -> Tensor:
    """Clears first, and computes its own loss."""
    arm.optimizer.zero_grad()
    total = torch.zeros(())
    for part in micro_batches(window):
        loss = F.cross_entropy(arm.model(part.inputs), part.targets, reduction="sum") / len(window)
        loss.backward()
        total = total + loss.detach().double()
    if arm.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(arm.model.parameters(), arm.clip_norm)
    arm.optimizer.step()
    arm.schedule.step()
    return total


def zeros_not_none(arm: Arm, window: Batch) -> Tensor:
    """Looks at the loss of the whole window first, without gradients; keeps its gradients as zeros."""
    with torch.no_grad():
        total = F.cross_entropy(arm.model(window.inputs), window.targets)
    for part in micro_batches(window):
        (F.cross_entropy(arm.model(part.inputs), part.targets) * (len(part) / len(window))).backward()
    if arm.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(arm.model.parameters(), arm.clip_norm)
    arm.optimizer.step()
    arm.schedule.step()
    arm.optimizer.zero_grad(set_to_none=False)
    return total


def undivided(arm: Arm, window: Batch) -> Tensor:
    arm.optimizer.zero_grad()
    total = torch.zeros(())
    for part in micro_batches(window):
        loss = F.cross_entropy(arm.model(part.inputs), part.targets)
        loss.backward()
        total = total + loss.detach().double() * (len(part) / len(window))
    if arm.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(arm.model.parameters(), arm.clip_norm)
    arm.optimizer.step()
    arm.schedule.step()
    return total


def never_clears(arm: Arm, window: Batch) -> Tensor:
    kept, arm.optimizer.zero_grad = arm.optimizer.zero_grad, lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        return usual(arm, window)
    finally:
        arm.optimizer.zero_grad = kept  # type: ignore[method-assign]


def forgets_the_last(arm: Arm, window: Batch) -> Tensor:
    return usual(arm, window.rows(slice(0, len(window) - 8)))


def turns_one_tensor(arm: Arm, window: Batch) -> Tensor:
    """Something that is in no catalogue."""
    first = next(arm.model.parameters())
    handle = first.register_hook(lambda gradient: gradient.flip(0))
    try:
        return usual(arm, window)
    finally:
        handle.remove()


def steps_twice(arm: Arm, window: Batch) -> Tensor:
    total = usual(arm, window)
    arm.optimizer.step()
    return total


def forgets_its_momentum(arm: Arm, window: Batch) -> Tensor:
    """The optimizer's state is wrong, and not because it advanced too often."""
    arm.optimizer.state.clear()
    return usual(arm, window)


def undivided_and_too_fast(arm: Arm, window: Batch) -> Tensor:
    """Two faults."""
    total = undivided(arm, window)
    for _ in range(3):
        arm.schedule.step()
    return total


def looks_again(arm: Arm, window: Batch) -> Tensor:
    """A forward that no backward goes through, with gradients recorded."""
    total = usual(arm, window)
    arm.model(window.inputs)
    return total


@pytest.mark.parametrize(
    ("loop", "verdict", "cause"),
    [
        (usual, "equivalent", ""),
        (zeros_not_none, "equivalent", ""),
        (undivided, "different", "loss_not_divided"),
        (never_clears, "different", "gradients_not_cleared"),
        (forgets_the_last, "different", "window_misplaced"),
        (turns_one_tensor, "different", "unexplained"),
        (steps_twice, "different", "window_misplaced"),
        (forgets_its_momentum, "different", "unexplained"),
        (undivided_and_too_fast, "different", "loss_not_divided+schedule_per_micro_batch"),
        (looks_again, "equivalent", ""),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_loops_are_judged_by_what_they_do(loop: Callable[[Arm, Batch], Tensor], verdict: str, cause: str) -> None:
    row = judge_loop(CONFIG, loop)
    assert (row["verdict"], row["cause"]) == (verdict, cause), row["reasons"]


def test_a_loop_that_scales_is_followed_in_float16() -> None:
    def scaled(arm: Arm, window: Batch) -> Tensor:
        total = torch.zeros(())
        for part, normaliser in arm.micro_batches(window):
            with torch.autocast("cpu", dtype=torch.float16, enabled=arm.precision == Precision.float16):
                outputs = arm.model(part.inputs)
            loss = arm.workload.losses(outputs, part).sum() / normaliser
            arm.scaler.scale(loss).backward()
            total = total + loss.detach().double()
        arm.scaler.unscale_(arm.optimizer)
        if arm.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(arm.model.parameters(), arm.clip_norm)
        arm.scaler.step(arm.optimizer)
        arm.scaler.update()
        arm.schedule.step()
        arm.optimizer.zero_grad()
        return total

    config = dataclasses.replace(CONFIG, precision=Precision.float16, split=Split.ragged, algebra_steps=2)
    row = judge_loop(config, scaled)
    assert (row["verdict"], row["cause"]) == ("equivalent", ""), row["reasons"]


def test_rows_are_recognised_by_their_content() -> None:
    window = Toy().batch(torch.tensor([5, 3, 11, 7]))
    assert recognised(window.inputs[[2, 0]], window).tolist() == [11, 5]
    assert recognised(window.inputs[:2] + 1, window).tolist() == [-1, -1]
    assert recognised(window.inputs[:2, :4], window).tolist() == [5, 3], "trimmed"
    assert recognised(torch.zeros(2, 5, 1), window).tolist() == [-1, -1]
