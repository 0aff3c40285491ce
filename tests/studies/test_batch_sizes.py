"""Training at B and at B / N against numpy, on equal samples."""

import numpy as np
import pytest

from accumulation_harness.experiments.learning_rate import batch_sizes
from tests.toy_setting import Numpy
from tests.trials import trial


def test_every_batch_size_against_numpy(toy_setting):
    """B = 10 of 24 samples: windows of 10, 10, 4; with N = 5 the short one has two micro-batches of 2."""
    setting = toy_setting(trial("optimizer.lr=0.3 precision=float64 effective_batch=10 accumulation_steps=[5,2] steps=7"))
    oracle, rows = Numpy(setting), {}
    for row in batch_sizes.measurements(setting, lambda step, rows: None):
        rows[row["accumulation_steps"]] = row
    everything = np.arange(24)
    for num, size in ((1, 10), (2, 5), (5, 2)):
        theta = oracle.start
        for ids in oracle.windows():
            window = []
            for chunk in np.split(ids, range(size, len(ids), size)):
                window.append(oracle.loss(theta, chunk))
                theta = theta - 0.3 * oracle.gradient(theta, chunk)
        row = rows[num]
        assert (row["batch"], row["samples"]) == (size, 58)
        assert row["held_out_loss"] == pytest.approx(oracle.loss(theta, everything), rel=1e-10)
        assert row["final_loss"] == pytest.approx(np.mean(window), rel=1e-10)
        halves = [oracle.loss(theta, part) for part in np.split(everything, 2)]
        assert [row["tuning_loss"], row["judged_loss"]] == pytest.approx(halves, rel=1e-10)
