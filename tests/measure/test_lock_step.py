"""What comparing costs in memory, that a probe sees each arm where it stands, and whose an overflow is."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from accumulation_harness.config import (
    Model,
    OptimizerConfig,
    OptimizerName,
    Precision,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.judge.counters import Counter
from accumulation_harness.measure.lock_step import REFERENCE, Gradients, LockStep, Setting
from accumulation_harness.measure.memory import Live
from accumulation_harness.recipes.micro_batch import Even
from accumulation_harness.recipes.recipe import Recipe, step, unscale, update_scale
from accumulation_harness.referee.gradients import flatten
from accumulation_harness.referee.oracle import snapshot

CPU = torch.device("cpu")
CONFIG = TrialConfig(workload=WorkloadConfig(model=Model.mlp, width=32), effective_batch=8, accumulation_steps=(2,))


def lock_of(setting, num_arms, **recipe):
    labels = [REFERENCE, *(f"arm/{i}" for i in range(num_arms - 1))]
    recipes = {
        label: Recipe(accumulation_steps=1 + (label != REFERENCE), split=Even(8 if label == REFERENCE else 4), **recipe)  # type: ignore[arg-type]
        for label in labels
    }
    return LockStep(setting.arms(recipes, steps=9), setting.config.seed)


def test_comparing_keeps_as_much_however_many_arms():
    """With SGD, so that arms carry no state of their own; gradients that are kept must differ."""
    setting = Setting(CONFIG, CPU)
    size = sum(p.numel() for p in setting.initial.parameters()) * 4
    most: dict[Gradients, list[float]] = {"compared": [], "kept": []}
    for gradients, found in most.items():
        for num_arms in (3, 9):
            lock = lock_of(setting, num_arms)
            with Live(p for arm in lock.arms.values() for p in arm.model.parameters()) as live:
                lock.step(next(setting.windows()), gradients=gradients)
            found.append(live.most / size - num_arms)
    assert most["compared"][1] < most["compared"][0] + 0.5 and most["kept"][1] > most["kept"][0] + 4


def test_a_probe_is_asked_before_the_arm_moves():
    adam = OptimizerConfig(name=OptimizerName.adam, lr=0.01)
    setting = Setting(dataclasses.replace(CONFIG, optimizer=adam), CPU)
    lock, referee = lock_of(setting, 3), setting.referee()
    for ids in setting.windows(2):
        at: dict[str, Tensor] = {}

        def exact(label, ids=ids, at=at):
            at[label] = flatten(lock.arms[label].model.parameters())
            return referee.gradient(snapshot(lock.arms[label].model), setting.exact.batch(ids)) if label != "arm/1" else None

        before = {label: flatten(arm.model.parameters()) for label, arm in lock.arms.items()}
        records = lock.step(ids, gradients="compared", exact=exact)
        assert all(torch.equal(at[label], before[label]) for label in before)
        assert 0 < records["arm/0"].gradient_error < 1e-5  # float32 against float64
        assert records["arm/1"].gradient_error != records["arm/1"].gradient_error


@pytest.mark.parametrize("optimizer", [OptimizerName.sgd, OptimizerName.adam])
@pytest.mark.parametrize("scaled", [(), (1,), (0, 2), (0, 1, 2, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_what_float16_overflows_in_one_arm_alone_is_no_difference_of_the_loop(toy_setting, optimizer, scaled):
    """The arm meets an infinite gradient in the windows `scaled`; the same windows left out by the loop are a difference."""
    config = dataclasses.replace(CONFIG, precision=Precision.float16, optimizer=OptimizerConfig(name=optimizer, lr=0.01))
    setting = toy_setting(config)
    right = Recipe(accumulation_steps=2, split=Even(4))

    def overflow(arm):
        if arm.windows in scaled:
            for p in arm.model.parameters():
                assert p.grad is not None
                p.grad[0] = math.inf

    def left_out(arm):
        for stage in right.at_boundary:
            if stage not in (unscale, step, update_scale) or arm.windows not in scaled:
                stage(arm)

    lost = dataclasses.replace(right, after_backward=(overflow,))
    skips = dataclasses.replace(right, at_boundary=(left_out,))
    lock = LockStep(setting.arms({REFERENCE: right, "overflowed": lost, "left out": skips}), config.seed)
    for ids in setting.windows(4):
        lock.step(ids)
    assert lock.loss_scales["overflowed"].overflows == list(scaled)
    assert lock.arms["overflowed"].scaler.get_scale() == config.loss_scale / 2 ** len(scaled)
    assert not lock.differing_counters("overflowed")
    assert not lock.loss_scales["left out"].overflows
    assert (Counter.optimizer_steps in lock.differing_counters("left out")) == bool(scaled)
