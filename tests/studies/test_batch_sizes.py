"""Training at B and at B / N against numpy; equal samples, equal steps, and the noise of a curve."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.config import OptimizerConfig, Precision, TrialConfig
from harness.studies import batch_sizes
from harness.studies.batch_sizes import detrended, roughness, still_falling


def test_every_batch_size_against_numpy(toy_setting, make_numpy) -> None:
    """B = 10 of 24 samples: windows of 10, 10, 4; with N = 5 the short one has two micro-batches of 2."""
    config = TrialConfig(
        optimizer=OptimizerConfig(lr=0.3), precision=Precision.float64, effective_batch=10, accumulation_steps=(5, 2), steps=7
    )
    setting = toy_setting(config)
    oracle, rows = make_numpy(setting), {}
    for row in batch_sizes.measurements(setting, lambda step, rows: None):
        rows[row["accumulation_steps"]] = row
    everything = np.arange(24)
    for num, size in ((1, 10), (2, 5), (5, 2)):
        theta, early, losses = oracle.start, None, []
        for ids in oracle.windows():
            window = []
            for chunk in np.split(ids, range(size, len(ids), size)):
                window.append(oracle.loss(theta, chunk))
                theta = theta - 0.3 * oracle.gradient(theta, chunk)
                losses.append(window[-1])
                if len(losses) == 7:
                    early = oracle.loss(theta, everything)
        row = rows[num]
        assert (row["batch"], row["optimizer_steps"], row["samples"]) == (size, len(losses), 58)
        assert row["held_out_loss"] == pytest.approx(oracle.loss(theta, everything), rel=1e-10)
        assert row["early_held_out_loss"] == pytest.approx(early, rel=1e-10)
        assert row["final_loss"] == pytest.approx(np.mean(window), rel=1e-10)
        assert row["step_noise"] == pytest.approx(roughness(losses), rel=1e-8)
        assert row["probe_loss"] == pytest.approx(oracle.loss(theta, everything), rel=1e-10), "all 24 are probed"
        halves = [oracle.loss(theta, part) for part in np.split(everything, 2)]
        assert [row["tuning_loss"], row["judged_loss"]] == pytest.approx(halves, rel=1e-10)
    assert rows[1]["held_out_loss"] == rows[1]["early_held_out_loss"] != rows[5]["early_held_out_loss"]
    assert rows[5]["held_out_loss"] != rows[5]["early_held_out_loss"]
    assert rows[1]["step_noise"] == rows[1]["window_noise"]


def test_roughness_is_the_deviation_of_white_noise_and_blind_to_a_slow_trend() -> None:
    noise = np.random.default_rng(0).normal(0, 0.3, 20_000)
    assert roughness(list(noise)) == pytest.approx(0.3, rel=0.03)
    assert roughness(list(noise + np.linspace(5, 0, 20_000))) == pytest.approx(0.3, rel=0.03)
    assert roughness([9.0, 1.0, 1.0, 2.0]) == pytest.approx(math.sqrt(0.5))
    assert math.isnan(roughness([1.0, 2.0]))


def test_detrended_noise_is_blind_to_any_line() -> None:
    noise = np.random.default_rng(0).normal(0, 0.3, 20_000)
    assert detrended(list(noise)) == pytest.approx(0.3, rel=0.03)
    assert detrended(list(np.linspace(50_000, 0, 20_000))) == pytest.approx(0, abs=1e-9)
    assert roughness(list(np.linspace(50_000, 0, 20_000))) > 1, "which one difference is not"
    assert math.isnan(detrended([1.0, 2.0]))


def test_a_plateau_is_where_the_last_fifth_stays() -> None:
    assert still_falling([5.0] * 5 + [1.0] * 5) == 0 and still_falling([float(k) for k in range(20, 0, -1)]) > 0.3
