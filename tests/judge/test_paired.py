"""Paired trainings: each number against scipy, and what the announced number of seeds finds, by trainings of three losses."""

import math
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from accumulation_harness.judge.paired import LEVEL, Comparison, Paired, corrected, half_spread
from tests.slow import slow

RNG = np.random.default_rng(0)
LOOKS, SHARE = 2, 0.5  # of a command that is repeated with the announced seeds; what is planted, in standard deviations
EXPERIMENTS = 300


def test_the_margin_is_half_of_a_lower_limit_of_the_standard_deviation():
    values = RNG.normal(size=7)
    low = math.sqrt(6 * values.var(ddof=1) / stats.chi2.ppf(0.95, 6))
    assert half_spread(values)(7) == pytest.approx(0.5 * low)
    drawn = RNG.normal(0, 3, (4000, 5))
    assert np.mean([half_spread(own)(5) <= 1.5 for own in drawn]) == pytest.approx(0.95, abs=0.015)
    assert half_spread(values)(10_000) == pytest.approx(0.5 * values.std(ddof=1), rel=0.02)


def test_p_values_against_scipy_and_holm():
    """What differs by far less than the margin takes no part in the correction of the others."""
    above, narrow, wide = RNG.normal(2, 1, 9), RNG.normal(0, 0.01, 9), RNG.normal(0, 1, 9)
    found = corrected([Paired(differences=tuple(own), margin_at=lambda seeds: 0.2) for own in (above, narrow, wide)])
    each = [stats.ttest_1samp(own, 0).pvalue for own in (above, narrow, wide)]
    assert [one.p for one in found] == pytest.approx([2 * each[0], 3 * each[1], max(2 * each[0], each[2])])
    assert [one.verdict for one in found] == [Comparison.above, Comparison.same, Comparison.undecided]
    assert Paired(differences=(*-above,), margin_at=lambda seeds: 0.2, p=each[0]).verdict == Comparison.below
    spread = (stats.t.ppf(1 - LEVEL / 4, 8) + stats.t.ppf(0.8, 8)) * stats.sem(wide)
    assert found[2].detectable == pytest.approx(spread)


def test_so_many_seeds_find_the_margin():
    """Of differences whose spread is known (many pairs) the announced number has a power of 80 %, by the noncentral t."""
    pairs = Paired(differences=(*RNG.normal(0, 1, 400),), margin_at=lambda seeds: 0.1)
    num, spread = pairs.deciding_seeds, np.std(pairs.differences, ddof=1)
    power = stats.nct.sf(stats.t.ppf(1 - LEVEL / 2, num - 1), num - 1, 0.1 * math.sqrt(num) / spread)
    assert num > 400 and power == pytest.approx(0.8, abs=0.01)
    assert Paired(differences=(1.0,), margin_at=lambda seeds: 0.1).deciding_seeds is None
    assert Paired(differences=(0.0, 5.0, -5.0), margin_at=lambda seeds: 1e-9).deciding_seeds is None


# What is said of trainings -----------------------------------------------------------------------------------------------------


def squared(outputs, target):
    return (outputs[..., 0] - target).square()


def cross_entropy(outputs, target):
    return F.cross_entropy(outputs.flatten(0, 1), (target > 0).long().flatten(), reduction="none").view(target.shape)


def policy(outputs, target):
    """-A log pi(a): the action is whether x_0 > 0, which target and sample share, and the advantage the target."""
    return -(target * outputs.log_softmax(-1)[..., 0])


@cache
def ends(loss, seeds=2000, steps=24):
    """[2, seeds] held-out losses: two trainings of a small network from the same weights, on the same samples in other orders."""
    torch.manual_seed(0)
    x = torch.randn(96, 4)
    target = torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(96)
    start = [0.7 * torch.randn(seeds, 4, 6), 0.5 * torch.randn(seeds, 6, 2)]

    def forward(weights, rows):
        return torch.bmm(torch.tanh(torch.bmm(x[rows], weights[0])), weights[1])

    found = []
    for _ in range(2):
        weights = [one.clone().requires_grad_() for one in start]
        orders = torch.cat([torch.rand(seeds, 64).argsort(1) for _ in range(steps // 8)], 1)
        for step in range(steps):
            rows = orders[:, 8 * step : 8 * step + 8]
            gradients = torch.autograd.grad(loss(forward(weights, rows), target[rows]).mean(1).sum(), weights)
            with torch.no_grad():
                for one, gradient in zip(weights, gradients, strict=True):
                    one -= 0.2 * gradient
        rows = torch.arange(64, 96).expand(seeds, 32)
        with torch.no_grad():
            found.append(loss(forward(weights, rows), target[rows]).mean(1).double())
    return torch.stack(found).numpy()


def look(full, arm):
    """The arm, beside three that differ by rounding, as the accumulated trainings do."""
    arms = [*RNG.normal(0, 1e-7, (3, len(full))), arm - full]
    found = corrected([Paired(differences=(*own,), margin_at=half_spread(full), level=LEVEL / LOOKS) for own in arms])
    return found[-1], any(one.verdict in (Comparison.below, Comparison.above) for one in found)


def experiment(loss, planted, pilot=5):
    """The verdict with the announced number of seeds, and whether any of the two looks alarms."""
    full, arm = ends(loss)
    order = RNG.permutation(len(full))
    arm = arm + planted * full.std()
    first, alarm = look(full[order[:pilot]], arm[order[:pilot]])
    order = order[: first.deciding_seeds]
    second, again = look(full[order], arm[order])
    return second.verdict, alarm or again


@pytest.mark.parametrize("loss", [squared, slow(cross_entropy), slow(policy)])
def test_what_is_planted_is_found_and_nothing_is_not(loss):
    """Half a standard deviation by at least 80 % with the announced seeds, nothing by at most 5 %; but for 3 errors of 300."""
    error = 3 / math.sqrt(EXPERIMENTS)
    found = np.mean([experiment(loss, SHARE)[0] == Comparison.above for _ in range(EXPERIMENTS)])
    alarms = np.mean([experiment(loss, 0.0)[1] for _ in range(EXPERIMENTS)])
    assert found >= 0.8 - error * 0.4 and alarms <= 0.05 + error * 0.22
