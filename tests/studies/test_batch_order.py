"""Trainings that change their batch at half their samples: what is handed over, and what the halves are."""

import dataclasses

import pytest
import torch

from accumulation_harness.config import (
    ConfigError,
)
from accumulation_harness.config.validation import validate
from accumulation_harness.experiments.batch_order import batch_order
from accumulation_harness.measure.trial import full_batch
from accumulation_harness.recipes.recipe import take_step
from tests.trials import setting_of, trial

CONFIG = trial(
    "study=batch_order effective_batch=32 accumulation_steps=[4] steps=4 workload.model=mlp workload.width=1",
    "data.last_window=drop optimizer.name=adam optimizer.lr=0.01",
)


@pytest.fixture(scope="module")
def setting():
    return setting_of(CONFIG)


def test_the_halves_of_every_order(setting):
    """Before the switch the orders that begin alike are alike to the bit; after it none is another."""
    found = []
    rows = batch_order.measurements(setting, lambda t, own: found.append({row["arm"]: float(row["loss"]) for row in own}))
    for t, losses in enumerate(found):
        assert (losses["large"] == losses["large_then_small"]) is (t < 2)
        assert (losses["small"] == losses["small_then_large"]) is (t < 2)
        assert t == 0 or losses["large"] != losses["small"]
    ends = {row["arm"]: row for row in rows}
    assert ends["large"]["switch_loss"] == ends["large_then_small"]["switch_loss"] != ends["small"]["switch_loss"]
    assert len({row["test_loss"] for row in rows}) == 4 and {row["samples"] for row in rows} == {128}


def test_an_order_alone_is_trained_as_beside_the_others(setting):
    def ends(own):
        return {row["arm"]: row["test_loss"] for row in batch_order.measurements(own, lambda t, rows: None)}

    alone = dataclasses.replace(CONFIG, trained_arm="small_then_large-4")
    found, every = ends(setting_of(alone)), ends(setting)
    assert found == {"small_then_large": every["small_then_large"]}
    with pytest.raises(ConfigError, match=r"trained_arm=large-4: expected null without study=.*batch_order"):
        validate(dataclasses.replace(alone, study="gradient_noise", trained_arm="large-4"))


def test_to_switch_to_the_same_batch_changes_nothing(setting):
    windows = [setting.exact.batch(ids) for ids in setting.windows()]
    plain, first, second = (setting.arm(full_batch(CONFIG)) for _ in range(3))
    for window in windows:
        take_step(plain, plain.workload.batch(window.ids))
    for window in windows[:2]:
        take_step(first, first.workload.batch(window.ids))
    batch_order.continue_from(second, first)
    for window in windows[2:]:
        take_step(second, second.workload.batch(window.ids))
    for a, b, c in zip(plain.model.parameters(), second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(a, b) and not torch.equal(b, c)


def test_the_small_batch_has_a_rate_of_its_own_after_the_switch(setting):
    large, small = (batch_order.arm_at(setting, num) for num in (1, 4))
    window = small.workload.batch(next(setting.windows()))
    take_step(large, window)
    batch_order.continue_from(small, large)
    assert {group["lr"] for group in small.optimizer.param_groups} == {0.005}
    take_step(small, window)
    assert {group["lr"] for group in small.optimizer.param_groups} == {0.005}
    assert {int(state["step"]) for state in small.optimizer.state.values()} == {5}, "one step, and four of a quarter"
