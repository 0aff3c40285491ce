import math

import numpy as np
import pytest
from scipy import stats

from accumulation_harness.judge.statistics import (
    detectable,
    equivalence_p,
    holm,
    mean_interval,
    stands_apart,
    t_test,
)

RNG = np.random.default_rng(0)
SMALL = list(RNG.normal(0.0, 0.01, 12))
WIDE = list(RNG.normal(0.0, 0.1, 12))


def test_equivalence_p_against_two_one_sided_t_tests():
    above = stats.ttest_1samp(SMALL, -0.02, alternative="greater").pvalue
    below = stats.ttest_1samp(SMALL, 0.02, alternative="less").pvalue
    assert equivalence_p(SMALL, 0.02) == pytest.approx(max(above, below), rel=1e-12)


def test_mean_interval_against_scipy():
    expected = stats.t.interval(0.95, len(WIDE) - 1, loc=np.mean(WIDE), scale=stats.sem(WIDE))
    found = mean_interval(WIDE)
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-12)


def flipping(rng, runs):
    """Final losses of one seed's runs as training has them: rounding apart, and now and then one ReLU flips in one of them."""
    return rng.normal(0, 1e-9, runs) + 1e-4 * rng.normal(size=runs) * (rng.random(runs) < 0.15)


def alarms(seeds, nulls, *, planted, trials=250):
    """How often an arm that lies `planted` further off is found at 5 %, over simulated experiments."""
    rng, found = np.random.default_rng([seeds, nulls]), 0
    for _ in range(trials):
        runs = np.array([flipping(rng, nulls + 2) for _ in range(seeds)])
        runs[:, 0] += planted * rng.normal(size=seeds)
        own = runs - runs[:, 1:2]
        found += stands_apart(own[:, 0].tolist(), own[:, 2:].tolist())[1] <= 0.05
    return found / trials


@pytest.mark.parametrize(("seeds", "nulls"), [(3, 1), (4, 5)])
def test_equivalent_arms_raise_no_more_alarms_than_the_level(seeds, nulls):
    """Where rare flips made an F test of normal theory alarm; at most 5 %, and 3 binomial standard errors of 250."""
    assert alarms(seeds, nulls, planted=0.0) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 250)


@pytest.mark.parametrize(("seeds", "nulls", "least"), [(3, 1, 0.5), (4, 5, 0.95)])
def test_a_planted_difference_is_found(seeds, nulls, least):
    assert alarms(seeds, nulls, planted=1e-2) >= least


def one_by_one(differences, null):
    """The p value beyond what can be counted, by its definition: a run of every seed is drawn, and the sums are compared."""
    scores = []
    for own, others in zip(differences, null, strict=True):
        runs = [own, 0.0, *others]
        nearest = [min(abs(a - b) for j, b in enumerate(runs) if j != i) for i, a in enumerate(runs)]
        scores.append(np.log(np.maximum(nearest, np.finfo(np.float64).eps)))
    rng, p = np.random.default_rng(0), 0.0
    for number in (1_000, 20_000):
        sums = sum(one[rng.integers(len(one), size=number, dtype=np.uint16)] for one in scores)
        p = p if p > 0.2 else float((1 + np.sum(sums >= sum(one[0] for one in scores) - 1e-9)) / (number + 1))
    return p


@pytest.mark.parametrize("nulls", [[1] * 30, [2] * 12, [1, 5, 2, 3] * 6, [40] * 4])
@pytest.mark.parametrize("further", [0.0, 3e-9])
def test_drawn_p_values_are_those_of_one_draw_for_every_seed(nulls, further):
    """Rounded, so that many distances tie. Of arms like the others, which the first draws settle, and of arms further off."""
    rng = np.random.default_rng(3)
    null = [np.round(rng.normal(0, 1e-9, count), 10).tolist() for count in nulls]
    own = np.round(rng.normal(0, 1e-9, len(nulls)) + further, 10).tolist()
    found = stands_apart(own, null)[1]
    assert found == one_by_one(own, null)
    assert found < 0.2 if further else found > 0.2


def test_the_detectable_difference_is_found_as_often_as_it_says():
    rng, unit = np.random.default_rng(2), np.linspace(-1, 1, 12)
    shift = detectable((unit / unit.std(ddof=1)).tolist())
    found = np.mean([t_test((rng.normal(size=12) + shift).tolist()) < 0.05 for _ in range(1000)])
    missed = np.mean([t_test((rng.normal(size=12) + shift / 3).tolist()) < 0.05 for _ in range(1000)])
    assert abs(found - 0.8) < 0.05 and missed < 0.3


def test_holm_against_the_definition():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
