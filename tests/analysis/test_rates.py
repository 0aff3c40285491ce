import math

import pytest
from scipy import stats

from accumulation_harness.analysis.rates import Rate


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 1080), (3, 20), (19, 20), (20, 20), (137, 289)])
def test_interval_against_scipy(k, n):
    exact = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    assert (Rate(k, n).low, Rate(k, n).high) == pytest.approx((exact.low, exact.high), rel=1e-9)


def test_nothing_counted_says_nothing():
    empty = Rate(0, 0)
    assert all(math.isnan(value) for value in (empty.share, empty.low, empty.high))
    assert str(empty) == "0 of 0"
