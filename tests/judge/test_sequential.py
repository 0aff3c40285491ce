"""The sequential test of L1: exact limits, and how often it errs, simulated."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from accumulation_harness.judge.sequential import EARLY_LOOKS, LAST_LOOK, _critical, _ways, ratio_limits, spent

MOST = 30


def test_the_distribution_of_u_is_that_of_all_orders():
    counts = np.zeros(13)
    for chosen in combinations(range(7), 3):
        others = [place for place in range(7) if place not in chosen]
        counts[sum(one > other for one in chosen for other in others)] += 1
    assert _ways(3, 4).tolist() == counts.tolist() and counts.sum() == comb(7, 3)


@pytest.mark.parametrize(("m", "n", "alpha"), [(6, 6, 0.002), (10, 7, 0.003), (5, 30, 0.025)])
def test_limits_are_the_ratios_that_the_test_of_mann_and_whitney_bears(m, n, alpha):
    """Just inside a limit scipy's exact test does not reject the ratio at `alpha`, just outside it does."""
    rng = np.random.default_rng(m)
    top, bottom = 1.3 * rng.lognormal(0, 0.3, m), rng.lognormal(0, 0.3, n)
    low, high = ratio_limits(top.tolist(), bottom.tolist(), alpha)
    assert low < np.median(top) / np.median(bottom) < high

    def rejects(ratio, side):
        return bool(mannwhitneyu(top / ratio, bottom, alternative=side, method="exact").pvalue <= alpha)

    assert rejects(low * (1 - 1e-9), "greater") and not rejects(low * (1 + 1e-9), "greater")
    assert rejects(high * (1 + 1e-9), "less") and not rejects(high * (1 - 1e-9), "less")


def test_few_errors_have_no_limits_and_equal_ones_no_width():
    assert ratio_limits([1.0] * 3, [1.0] * 3, 0.002) == ratio_limits([], [1.0] * 30, 0.01) == (0.0, np.inf)
    assert ratio_limits([3.0] * 6, [2.0] * 6, 0.002) == pytest.approx((1.5, 1.5))


def test_beyond_what_is_counted_the_normal_distribution_goes_on():
    for alpha in (0.002, 0.01):
        below, above = _critical(50, 50, alpha) / 50**2, _critical(51, 51, alpha) / 51**2
        assert 0 < above - below < 0.01


def test_all_looks_together_err_by_a_fortieth_on_each_side():
    assert sum(EARLY_LOOKS.values()) + LAST_LOOK == pytest.approx(0.025)
    assert [k for k in range(1, MOST + 1) if spent(k, MOST)] == [*EARLY_LOOKS, MOST]
    assert [k for k in range(1, 100) if spent(k, 99)] == [*EARLY_LOOKS, 99] and spent(6, MOST, {}) is None


def decided(top, bottom, gate):
    """Where the test of one arm ends: `below` or `above` the gate, or `open`, and after how many errors of each."""
    for k in (k for k in range(1, MOST + 1) if spent(k, MOST)):
        low, high = ratio_limits(top[:k].tolist(), bottom[:k].tolist(), spent(k, MOST) or 0.0)
        if high <= gate or low > gate:
            return ("below" if high <= gate else "above"), k
    return "open", MOST


@pytest.mark.parametrize("spread", [0.05, 0.4, 2.0])
def test_the_simulated_error_is_no_larger_than_stated(spread, runs=200):
    """At a ratio of exactly the gate each side is called wrongly in at most 2.5 % of runs (here + 3 standard errors)."""
    rng = np.random.default_rng(3)
    ends = [decided(2 * rng.lognormal(0, spread, MOST), rng.lognormal(0, spread, MOST), 2.0)[0] for _ in range(runs)]
    allowed = 0.025 + 3 * (0.025 * 0.975 / runs) ** 0.5
    assert max(ends.count("below"), ends.count("above")) / runs <= allowed
    if spread < 1:  # and it must differ: the same errors, half as large or twice as large
        sides = [decided(r * rng.lognormal(0, spread, MOST), rng.lognormal(0, spread, MOST), 2.0) for r in (1.0, 4.0) * 10]
        assert [side for side, _ in sides] == ["below", "above"] * 10
        assert np.median([k for _, k in sides]) <= (6 if spread < 0.1 else 15)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.1, 0.3, 1.0])
def test_the_simulated_error_in_many_runs(spread):
    test_the_simulated_error_is_no_larger_than_stated(spread, runs=5000)
