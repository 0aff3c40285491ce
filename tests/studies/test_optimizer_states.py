"""Optimizer states: against numpy's momentum and Adam, and what has to differ."""

import math

import numpy as np
import pytest

from accumulation_harness.config import OUR_OPTIMIZERS, OptimizerConfig, OptimizerName, Split
from accumulation_harness.experiments.momentum import optimizer_states
from accumulation_harness.experiments.momentum.optimizer_states import same_memory
from tests.reference import sgd
from tests.toy_setting import Numpy
from tests.trials import measured, trial

CONFIG = (  # B = 10 of 24 samples: every third window is short (4), and its third micro-batch smaller than the others
    "optimizer.name=momentum optimizer.lr=0.1 precision=float64 effective_batch=10 accumulation_steps=[5] steps=7 "
)


def last(setting):
    rows = optimizer_states.measurements(setting, lambda step, rows: None)
    return {row["arm"]: row for row in rows if row["after_steps"] == setting.config.steps}


@pytest.mark.parametrize("name", OUR_OPTIMIZERS)
@pytest.mark.parametrize("split", list(Split))
def test_states_of_every_optimizer(toy_setting, name, split):
    num = 3 if split == Split.ragged else 5
    own = f"optimizer.name={name} optimizer.lr=0.05 split={split} accumulation_steps=[{num}]"
    rows = last(toy_setting(trial(CONFIG, own)))
    for arm in ("accumulated", "reordered", "permuted"):
        assert max(rows[arm]["gradient_error"], rows[arm]["parameter_error"]) < 1e-13
        assert math.isnan(rows[arm]["state_error"]) if name == OptimizerName.sgd else rows[arm]["state_error"] < 1e-13
    assert rows["accumulated"]["loss"] == pytest.approx(rows["accumulated"]["loss_against"], rel=1e-13)
    for arm in ("small_steps", "small_steps_reordered", "small_steps_rate", "small_steps_memory"):
        assert rows[arm]["parameter_error_now"] > 1e-3
    fault = rows["optimizer_state_per_micro_batch"]
    assert (fault["parameter_error"] < 1e-13) if name == OptimizerName.sgd else fault["state_error_now"] > 1e-3


def test_small_steps_and_full_batch_against_numpy(toy_setting):
    setting = toy_setting(trial(CONFIG))
    oracle = Numpy(setting)
    full, small, reordered = [], [], []

    def train(steps, lr, momentum):
        """Weights and velocity after a step on each batch of ids in turn."""
        theta, gradients = oracle.start, []
        for ids in steps:
            gradients.append(oracle.gradient(theta, ids))
            theta = sgd(oracle.start, gradients, lr, momentum)
        velocity = sum(momentum ** (len(gradients) - 1 - t) * g for t, g in enumerate(gradients))
        return theta, velocity

    for ids in oracle.windows():
        full.append(ids)
        chunks = np.split(ids, range(2, len(ids), 2))
        small += chunks
        reordered += chunks[::-1]
    root = 0.9 ** (1 / 5)
    arms = {
        "small_steps": (small, 0.1, 0.9),
        "small_steps_rate": (small, 0.02, 0.9),
        "small_steps_memory": (small, 0.02 * (1 - root) / 0.1, root),
    }
    rows = last(setting)
    theta, velocity = train(full, 0.1, 0.9)
    for arm, (steps, lr, momentum) in arms.items():
        own, own_velocity = train(steps, lr, momentum)
        expected = np.linalg.norm(own - theta) / np.linalg.norm(theta - oracle.start)
        assert rows[arm]["parameter_error_now"] == pytest.approx(expected, rel=1e-10)
        expected = np.linalg.norm(own_velocity - velocity) / np.linalg.norm(velocity)
        assert rows[arm]["state_error_now"] == pytest.approx(expected, rel=1e-10)
    (own, _), (usual, _) = train(reordered, 0.1, 0.9), train(small, 0.1, 0.9)
    expected = np.linalg.norm(own - usual) / np.linalg.norm(usual - oracle.start)
    assert rows["small_steps_reordered"]["parameter_error_now"] == pytest.approx(expected, rel=1e-10)
    assert rows["small_steps"]["loss"] == pytest.approx(
        np.mean([oracle.loss(train(small[: len(small) - k], 0.1, 0.9)[0], small[len(small) - k]) for k in range(5, 0, -1)])
    )


def test_batch_norm_couples_buffers_and_not_gradients():
    """On the digits: the toy has no normalisation."""
    rows = measured(trial(CONFIG, "study=optimizer_states norm=batch effective_batch=32 accumulation_steps=[4] steps=3"))
    row = next(row for row in rows if row["arm"] == "reordered" and row["after_steps"] == 3)
    assert row["gradient_error"] < 1e-13 and row["parameter_error"] < 1e-13 and row["buffer_error"] > 1e-3


def test_same_memory():
    """Adam moves by the rate under a constant gradient; what it is under momentum is among the paths above."""
    small = same_memory(OptimizerConfig(name=OptimizerName.adam, lr=0.3, beta1=0.7, beta2=0.9), 6)
    assert (small.lr, small.beta1**6, small.beta2**6) == pytest.approx((0.05, 0.7, 0.9))
