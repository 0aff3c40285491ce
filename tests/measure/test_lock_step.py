"""What comparing costs in memory, that a probe sees each arm where it stands, and whose an overflow is."""

import dataclasses
import math

import pytest

from accumulation_harness.judge.counters import Counter
from accumulation_harness.measure.lock_step import REFERENCE, LockStep
from accumulation_harness.measure.trial import accumulated
from accumulation_harness.recipes.recipe import step, unscale, update_scale
from tests.trials import trial


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("scaled", [(), (0, 2), (0, 1, 2, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_what_float16_overflows_in_one_arm_alone_is_no_difference_of_the_loop(toy_setting, optimizer, scaled):
    """The arm meets an infinite gradient in the windows `scaled`; the same windows left out by the loop are a difference."""
    config = trial(f"effective_batch=8 accumulation_steps=[2] precision=float16 optimizer.name={optimizer} optimizer.lr=0.01")
    setting, right = toy_setting(config), accumulated(config, 2)

    def overflow(arm):
        if arm.windows in scaled:
            for p in arm.model.parameters():
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
