"""The noise scale from micro-batches: its estimates by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.experiments.gradient_noise import fits as noise


def test_two_size_leaves_out_what_it_cannot_use() -> None:
    """A window of one micro-batch, and one that the scaler skipped."""
    usual = {"micro_batches": 4, "window_samples": 64, "micro_batch_square": 5.0, "window_square": 2.0}
    rows = pd.DataFrame(
        [usual, {**usual, "micro_batches": 1}, {**usual, "window_square": math.inf}, {**usual, "window_square": None}]
    )
    found = noise.two_size(rows)
    assert len(found) == 1
    # b = 16: S = 3 / (1/16 - 1/64), and |G|^2 = (B g - b m) / (B - b)
    assert found["noise_trace"].item() == pytest.approx(3 / (1 / 16 - 1 / 64))
    assert found["gradient_square"].item() == pytest.approx((64 * 2 - 16 * 5) / 48)
    again = noise.two_size(rows, population=100.0)
    assert again["gradient_square"].item() == pytest.approx(found["gradient_square"].item() + 64 / 100)


def test_stretches_are_equal_in_steps() -> None:
    rows = pd.DataFrame({"step": range(20), "noise_trace": [2.0] * 10 + [6.0] * 10, "gradient_square": [0.5, 1.5] * 10})
    found = noise.stretches(rows, 2)
    assert found["estimate"].tolist() == pytest.approx([2, 6]) and found["step"].tolist() == [5, 15] and set(found["n"]) == {10}


def test_slopes_of_power_laws() -> None:
    batches = np.array([4, 16, 64])
    rows = pd.concat(
        pd.DataFrame({"trial": name, "batch": batches, "variance": 3.0 * batches**power})
        for name, power in (("a", -1.0), ("b", -0.5))
    )
    assert noise.slopes(rows, "variance", ["trial"]).set_index("trial")["slope"].to_dict() == pytest.approx({"a": -1, "b": -0.5})
