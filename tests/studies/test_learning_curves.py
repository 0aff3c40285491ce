"""Curves at equal samples against numpy, the samples that are set aside, and small batches at their rates."""

import math

import numpy as np
import pytest

from accumulation_harness.config import (
    ConfigError,
)
from accumulation_harness.experiments.convergence import learning_curves
from accumulation_harness.experiments.convergence.learning_curves import SMALL, SMALL_MEMORY, Samples
from tests.toy_setting import Numpy
from tests.trials import trial

CONFIG = "optimizer.lr=0.3 precision=float64 effective_batch=10 accumulation_steps=[2,5] steps=7"


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_every_arm_against_numpy(toy_setting, schedule):
    """22 of 24 samples in windows of 10, 10, 2: the short one is one micro-batch at b = 5, and one at b = 2.

    A cosine ends at the same samples for all, small batches too.
    """
    setting = toy_setting(trial(CONFIG, f"schedule.name={schedule}"))
    seen = []
    rows = {
        (row["arm"], row["accumulation_steps"]): row for row in learning_curves.measurements(setting, lambda t, r: seen.append(r))
    }
    assert set(rows) == {
        ("full", 1),
        ("permuted", 1),
        *((arm, n) for arm in ("accumulated", SMALL, SMALL_MEMORY) for n in (2, 5)),
    }
    oracle, chosen = Numpy(setting), Samples.drawn(setting)
    windows = [ids.numpy() for ids in chosen.windows(setting)]
    for (arm, num), row in rows.items():
        small = arm in (SMALL, SMALL_MEMORY)
        size, lr = (10 // num, 0.3 / num) if small else (10, 0.3)
        theta, steps, probe, validation = oracle.start, [0], [], []
        for t in range(-1, len(windows)):
            if t >= 0:
                parts = np.split(windows[t], range(size, len(windows[t]), size))
                steps.append(steps[-1] + len(parts))
                share = 0.5 * (1 + math.cos(math.pi * t / 7)) if schedule == "cosine" else 1.0
                for part in parts:
                    theta = theta - share * lr * oracle.gradient(theta, part)
            probe.append(oracle.loss(theta, chosen.probe.numpy()))
            validation.append(oracle.loss(theta, chosen.validation.numpy()))
        assert row["curve_probe_loss"] == pytest.approx(probe, rel=1e-9)
        assert row["curve_validation_loss"] == pytest.approx(validation, rel=1e-9)
        assert row["curve_optimizer_steps"] == steps and row["curve_samples"] == [0, 10, 20, 22, 32, 42, 44, 54]
        assert row["test_loss"] == pytest.approx(oracle.loss(theta, np.arange(24)), rel=1e-9)
        assert row["gap"] == pytest.approx(row["test_loss"] - probe[-1])
        assert row["rate"] == pytest.approx(lr)
        assert np.all(np.diff(row["curve_seconds"]) > 0)
    assert rows[SMALL, 5]["curve_probe_loss"] != pytest.approx(rows["full", 1]["curve_probe_loss"], rel=1e-3)
    assert [len(step) for step in seen] == [len(rows)] * 7 and seen[0][0]["arm"] == "full"
    assert [one["probe_loss"] for one in (step[0] for step in seen)] == rows["full", 1]["curve_probe_loss"][1:]


def test_what_is_set_aside_is_never_trained_on(toy_setting):
    setting = toy_setting(trial(CONFIG))
    chosen = Samples.drawn(setting)
    trained = {int(i) for ids in chosen.windows(setting) for i in ids}
    assert len(chosen.validation) == 2 and trained == set(range(24)) - set(chosen.validation.tolist())
    assert set(chosen.probe.tolist()) <= trained


def test_arms_that_choose_no_rate_are_not_trained_where_rates_are_chosen(toy_setting):
    def arms(seed):
        rows = learning_curves.measurements(toy_setting(trial(CONFIG, f"seed={seed}")), lambda t, r: None)
        return {(row["arm"], row["accumulation_steps"]): row["curve_probe_loss"] for row in rows}

    chooses = {("full", 1), *((arm, n) for arm in (SMALL, SMALL_MEMORY) for n in (2, 5))}
    assert set(arms(100)) == chooses < set(arms(99))


def test_an_arm_alone_is_trained_as_beside_the_others(toy_setting):
    def arms(trained):
        found = learning_curves.measurements(toy_setting(trial(CONFIG, f"trained_arm={trained}")), lambda t, r: None)
        return {(row["arm"], row["accumulation_steps"]): {k: v for k, v in row.items() if "seconds" not in k} for row in found}

    every = arms("null")
    with_full = {("full", 1), ("permuted", 1), ("accumulated", 2), ("accumulated", 5)}
    assert arms("full-1") == {key: every[key] for key in with_full}
    assert arms("small_batch_memory-5") == {(SMALL_MEMORY, 5): every[SMALL_MEMORY, 5]}
    with pytest.raises(ConfigError, match=r"trained_arm=accumulated-2: expected one of full-1, small_batch-2, .*"):
        arms("accumulated-2")
