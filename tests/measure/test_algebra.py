"""L0 on a softmax regression, beside numpy in float64: its numbers, and that its gates reject something and accept less."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config import Norm, OptimizerConfig, OptimizerName, Split, TrialConfig
from harness.judge.cause import Cause
from harness.judge.counters import Counter
from harness.judge.gates import ALGEBRA_GATE, TRAJECTORY_GATE
from harness.judge.verdict import algebra_failures
from harness.measure.algebra import ACTIVE, AlgebraResult, is_probe, measure
from harness.measure.lock_step import REFERENCE, Setting
from harness.recipes.micro_batch import windows
from harness.recipes.recipe import Arm, Recipe
from harness.trial import accumulated, permuted, reference
from tests.toy_setting import MakeSetting, Numpy

STEPS = 6  # windows of 10, 10 and 4 of the 24 samples, twice
SGD = OptimizerConfig(lr=0.3)
CONFIG = TrialConfig(
    effective_batch=10, accumulation_steps=(2,), steps=STEPS, norm=Norm.none, optimizer=SGD, split=Split.ragged
)  # fmt: skip
FLOOR, WRONG = "floor", "wrong"


def after_backward_scaled(factor: float) -> Callable[[Recipe], Recipe]:
    """The accumulated gradient times `factor`, just before the step."""

    def scale(arm: Arm) -> None:
        for parameter in arm.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)

    return lambda recipe: dataclasses.replace(recipe, at_boundary=(scale, *recipe.at_boundary))


def stream(setting: Setting) -> list[Tensor]:
    config = setting.config
    return list(itertools.islice(windows(24, config.effective_batch, config.seed, config.data.last_window), STEPS))


def algebra(setting: Setting, change: Callable[[Recipe], Recipe] = lambda recipe: recipe) -> AlgebraResult:
    config = setting.config
    recipes = {REFERENCE: reference(config), FLOOR: permuted(config, 0), WRONG: change(accumulated(config, 2))}
    return measure(setting, recipes, stream(setting), FLOOR)[WRONG]


@pytest.mark.parametrize(
    ("step", "size", "expected"),
    [(0, 10, True), (1, 10, True), (2, 10, False), (5, 10, True), (7, 4, True), (7, 10, False), (10, 10, True)],
)
def test_the_first_two_windows_every_fifth_and_short_ones_are_probed(step: int, size: int, expected: bool) -> None:
    assert is_probe(step, torch.arange(size), 5, 10) == expected


@pytest.mark.parametrize("optimizer", [OptimizerName.sgd, OptimizerName.momentum, OptimizerName.adam])
def test_a_right_arm_is_far_below_every_gate(toy_setting: MakeSetting, optimizer: OptimizerName) -> None:
    config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(name=optimizer, lr=0.1))
    found = algebra(toy_setting(config))
    assert not algebra_failures(found.algebra) and not found.counters
    assert found.algebra.error < ALGEBRA_GATE / 100 and found.algebra.trajectory_error < TRAJECTORY_GATE / 100
    assert 0 < found.algebra.floor < ALGEBRA_GATE / 100
    assert (found.algebra.steps, found.algebra.short_windows, found.algebra.unequal_terms) == (STEPS, 2, True)
    assert found.signature.wrong == 0 and found.signature.probes > STEPS / 2


@pytest.mark.parametrize(("factor", "fails"), [(1.2, True), (0.8, False)])
def test_the_gate_of_the_gradient_rejects_just_above_and_accepts_just_below(
    toy_setting: MakeSetting, factor: float, fails: bool
) -> None:
    found = algebra(toy_setting(CONFIG), after_backward_scaled(1 + factor * ALGEBRA_GATE))
    assert found.algebra.gradient_error == pytest.approx(factor * ALGEBRA_GATE, rel=0.01)  # a few roundings of 2^-53
    assert bool(algebra_failures(found.algebra)) == fails == bool(found.signature.wrong)


def drifting(size: float) -> Callable[[Recipe], Recipe]:
    """The first window alone, which the trajectory never forgets: its gradient is larger by a relative `size`."""

    def scale(arm: Arm) -> None:
        for parameter in arm.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 + size * (arm.windows == 2))  # windows 0 and 1 are probed, and so is every short one

    return lambda recipe: dataclasses.replace(recipe, at_boundary=(scale, *recipe.at_boundary))


def numpy_trajectory(numbers: Numpy, scales: dict[int, float]) -> list[Any]:
    """Weights after each of the steps of plain SGD, the gradient of step t multiplied by `scales[t]`."""
    theta, path = numbers.start, []
    for t, ids in enumerate(numbers.windows()):
        theta = theta - CONFIG.optimizer.lr * scales.get(t, 1.0) * numbers.gradient(theta, ids)
        path.append(theta)
    return path


def test_the_errors_of_a_scaled_gradient_are_those_of_numpy(
    toy_setting: MakeSetting, make_numpy: Callable[[Setting], Numpy]
) -> None:
    setting = toy_setting(CONFIG)
    found, numbers = algebra(setting, after_backward_scaled(1.25)), make_numpy(setting)
    right, wrong = numpy_trajectory(numbers, {}), numpy_trajectory(numbers, dict.fromkeys(range(STEPS), 1.25))
    distances = [np.linalg.norm(a - b) / np.linalg.norm(b - numbers.start) for a, b in zip(wrong, right, strict=True)]
    assert found.algebra.trajectory_error == pytest.approx(max(distances), rel=1e-10)
    assert found.algebra.gradient_error == pytest.approx(0.25, rel=1e-12)
    worst = found.signature.worst_window
    assert worst is not None and worst.whole.scale == pytest.approx(1.25, rel=1e-12)
    assert worst.whole.weights == pytest.approx([1.25] * worst.micro_batches, rel=1e-10)
    assert found.signature.wrong == found.signature.probes and not algebra_failures(algebra(setting).algebra)


@pytest.mark.parametrize(("size", "fails"), [(1.2, True), (0.8, False)])
def test_the_gate_of_the_trajectory_rejects_just_above_and_accepts_just_below(
    toy_setting: MakeSetting, make_numpy: Callable[[Setting], Numpy], size: float, fails: bool
) -> None:
    """An error in a window that no probe sees, of the size that moves the trajectory by `size` gates: then the window is found."""
    setting = toy_setting(dataclasses.replace(CONFIG, effective_batch=8, probe_every=10))  # 24 = 3 x 8: no short window
    numbers = make_numpy(setting)
    right, wrong = numpy_trajectory(numbers, {}), numpy_trajectory(numbers, {2: 1 + 1e-3})
    moved = max(np.linalg.norm(a - b) / np.linalg.norm(b - numbers.start) for a, b in zip(wrong, right, strict=True))
    found = algebra(setting, drifting(size * TRAJECTORY_GATE * 1e-3 / moved))
    planted = size * TRAJECTORY_GATE * 1e-3 / moved
    assert found.algebra.gradient_error == (pytest.approx(planted, rel=1e-4) if fails else pytest.approx(0, abs=ALGEBRA_GATE))
    assert found.algebra.parted_at is None
    assert found.algebra.trajectory_error == pytest.approx(size * TRAJECTORY_GATE, rel=0.01)
    assert bool(algebra_failures(found.algebra)) == fails


def test_clipping_is_tried_when_none_is_configured_and_off_when_it_was_active(toy_setting: MakeSetting) -> None:
    free = algebra(toy_setting(CONFIG)).algebra
    assert free.clipping_active and free.clipped_share == 0, f"active by construction, at {ACTIVE} of the first norm"
    clipped = algebra(toy_setting(dataclasses.replace(CONFIG, clip_norm=1e-3))).algebra
    assert clipped.clipping_active and clipped.clipped_share == 1
    never = algebra(toy_setting(dataclasses.replace(CONFIG, clip_norm=1e3))).algebra
    assert never.clipping_active and never.clipped_share == 0


def test_a_fault_of_clipping_shows_although_none_is_configured(toy_setting: MakeSetting) -> None:
    def clip_twice(arm: Arm) -> None:
        if arm.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(arm.model.parameters(), arm.clip_norm)

    found = algebra(toy_setting(CONFIG), lambda recipe: dataclasses.replace(recipe, after_backward=(clip_twice,)))
    assert found.algebra.gradient_error > 0.01
    assert found.signature.explanations[(Cause.clip_per_micro_batch,)] < ALGEBRA_GATE


def test_counters_that_differ_are_told_with_both_values(toy_setting: MakeSetting) -> None:
    def miscount(arm: Arm) -> None:
        arm.samples += 3

    setting = toy_setting(CONFIG)
    found = algebra(setting, lambda recipe: dataclasses.replace(recipe, at_boundary=(*recipe.at_boundary, miscount)))
    seen = sum(len(ids) for ids in stream(setting))
    assert found.counters == {Counter.samples: (seen + 3 * STEPS, seen)}
    assert not algebra_failures(found.algebra)
