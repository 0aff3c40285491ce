"""mnist1d against its published recipe, written once more as slow steps on one sample."""

import numpy as np
import pytest
from scipy.interpolate import interp1d
from scipy.ndimage import gaussian_filter

from accumulation_harness.workloads.mnist1d import generate, templates


def slow_sample(draws, label):
    """One sample by the recipe of arXiv:2011.14439, without the last centring."""

    def interpolated(x, places):
        return np.asarray(interp1d(np.linspace(0, 1, len(x)), x)(np.linspace(0, 1, places)))

    x = np.concatenate([templates()[label] + 1e-8, np.zeros(36 + int(draws.random() * 25))])
    x = interpolated(x, 72) * (1 + 0.4 * (draws.random() - 0.5))
    k = draws.integers(48)
    x = np.concatenate([x[-k:], x[:-k]])
    mask = x != 0
    x = mask * x + (1 - mask) * gaussian_filter(0.25 * draws.standard_normal(72), 2)
    x = x + 0.02 * draws.standard_normal(72)
    x = x - 0.75 * (draws.random() - 0.5) * np.linspace(-0.5, 0.5, 72)
    return interpolated(x, 40)


def test_samples_are_distributed_as_the_recipe_draws_them():
    """Class means and covariances of 600 samples a digit agree with the slow recipe's within sampling; another digit's do not."""
    num = 600
    fast, labels = generate(10 * num, 7)
    draws = np.random.default_rng(1)
    slow = np.stack([slow_sample(draws, label) for label in (0, 7) for _ in range(num)])
    scale = np.stack([slow_sample(draws, label) for label in range(10) for _ in range(200)])
    slow = (slow - scale.mean()) / scale.std()
    for place, label in enumerate((0, 7)):
        mine, theirs = fast[labels == label], slow[place * num : (place + 1) * num]
        other = fast[labels == 7 - label]

        def apart(a, b):
            """Mean squared distance of the class means, in standard errors: 1 where the two are drawn alike."""
            return float(((a.mean(0) - b.mean(0)) ** 2 / ((a.var(0) + b.var(0)) / num)).mean())

        assert apart(mine, theirs) < 3 < 10 < apart(other, theirs)
        assert mine.std(0).mean() == pytest.approx(theirs.std(0).mean(), rel=0.05)
        assert np.abs(np.diff(mine)).mean() == pytest.approx(np.abs(np.diff(theirs)).mean(), rel=0.05)
