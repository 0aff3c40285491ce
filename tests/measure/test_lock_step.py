"""What comparing costs in memory, that a probe sees each arm where it stands, and whose an overflow is."""

import dataclasses
import math

import pytest

from accumulation_harness.config import (
    Model,
    OptimizerConfig,
    OptimizerName,
    Precision,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.judge.counters import Counter
from accumulation_harness.measure.lock_step import REFERENCE, LockStep
from accumulation_harness.recipes.micro_batch import Even
from accumulation_harness.recipes.recipe import Recipe, step, unscale, update_scale

CONFIG = TrialConfig(workload=WorkloadConfig(model=Model.mlp, width=32), effective_batch=8, accumulation_steps=(2,))


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
