"""Intervals and tests on small samples by scipy, whose import takes its time: trials do without (`interval.py`).

Distributions are those of `scipy.special`, which `scipy.stats` rests on: half a second less to import, and a hundredth per value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accumulation_harness.judge.interval import Interval

MOST_ENUMERATED = 20_000  # ways to call one run of every seed the arm; beyond, as many are drawn
FEW_DRAWN, CLEARLY_NOTHING = 1_000, 0.2  # draws at first; above this p value they are enough
RESOLUTION = 1e-14  # relative: differences that agree to so many digits have no spread
ROUNDING = 1e-9  # of a sum of logarithms: equal sums in another order count as equal


def mean_interval(differences: Sequence[float], *, level: float = 0.95) -> Interval:
    """Compute the mean and its Student t interval.

    Args:
        differences: [n] values.
        level: Confidence of the interval.

    Returns:
        mean ± t s / sqrt(n), with s of reduction n - 1; NaN limits below two values.
    """
    freedom, mean, error = _estimated(differences)
    half = float(special.stdtrit(freedom, (1 + level) / 2) * error)
    return Interval(mean, mean - half, mean + half)


def _estimated(differences: Sequence[float]) -> tuple[int, float, float]:
    """Degrees of freedom, the mean, and its standard error s / sqrt(n) with s of reduction n - 1; NaN where it has none."""
    values = np.asarray(differences, dtype=np.float64)
    num = len(values)
    mean = float(values.mean()) if num else math.nan
    return num - 1, mean, float(values.std(ddof=1) / math.sqrt(num)) if num > 1 else math.nan


def equivalence_p(differences: Sequence[float], margin: float) -> float:
    """Test the equivalence of two trainings, |mean difference| < margin, by two one-sided paired t tests (TOST; Lakens 2017).

    Args:
        differences: [n] paired differences.
        margin: The largest difference that counts as none.

    Returns:
        The larger of the two p values; NaN below two pairs; 0 or 1 if all differences are the same.
    """
    freedom, mean, error = _estimated(differences)
    if error == 0:
        return 0.0 if abs(mean) < margin else 1.0
    return float(special.stdtr(freedom, (abs(mean) - margin) / error))


def stands_apart(differences: Sequence[float], null: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Test whether an arm ends farther from its reference than control runs end from each other.

    If only rounding separates the runs of a seed, the arm, the reference and the controls are exchangeable. The statistic is
    the mean over seeds of log(distance to the nearest other run of the seed). Its null distribution calls each run of each seed
    the arm, so the p value holds for any mixture of distances, for example if one ReLU flips in the reference of one seed.
    Distances below float64's epsilon count as that.

    Args:
        differences: [n] arm - reference, one per seed, in units of the resolution.
        null: [n] for each seed, control runs - reference.

    Returns:
        How many times farther off the arm is (geometric mean over seeds), and the permutation p value, which is at least m^-n
        for m runs in each of n seeds. NaN below two seeds with controls.
    """
    groups = [[own, 0.0, *others] for own, others in zip(differences, null, strict=True) if others]
    if len(groups) < 2:
        return float("nan"), float("nan")
    sizes = tuple(map(len, groups))
    scores = _log_distances(groups)
    observed = float(scores[:, 0].sum())
    apart = math.exp(np.mean(scores[:, 0] - np.nanmean(scores[:, 1:], axis=1)))
    if math.prod(sizes) <= MOST_ENUMERATED:
        return apart, float(np.mean(_sums(scores, sizes) >= observed - ROUNDING))
    rng, p = np.random.default_rng(0), 0.0
    for number in (FEW_DRAWN, MOST_ENUMERATED):
        if p <= CLEARLY_NOTHING:
            rows = zip(scores, sizes, strict=True)
            sums = sum(row.take(rng.integers(size, size=number, dtype=np.uint16)) for row, size in rows)
            p = float((1 + np.sum(sums >= observed - ROUNDING)) / (number + 1))
    return apart, p


def _log_distances(groups: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """[groups, runs of the largest]: the log of each run's distance to the nearest other of its group, then NaN."""
    runs = np.array(list(zip_longest(*groups, fillvalue=np.nan))).T
    distances = np.abs(runs[:, :, None] - runs[:, None, :])
    own = np.arange(runs.shape[1])
    distances[:, own, own] = np.nan
    logs: NDArray[np.float64] = np.log(np.maximum(np.fmin.reduce(distances, axis=2), np.finfo(np.float64).eps))
    return logs


def _sums(scores: NDArray[np.float64], sizes: Sequence[int]) -> NDArray[np.float64]:
    """[product of sizes]: the sum of one score of each row, for every way to choose them among its first `size`."""
    sums = np.zeros(1)
    for row, size in zip(scores, sizes, strict=True):
        sums = (sums[:, None] + row[:size]).ravel()
    return sums


def detectable(differences: Sequence[float], level: float = 0.05) -> float:
    """Compute the smallest mean difference that a paired t test finds with a power of 80 %.

    Args:
        differences: [n] paired differences, whose standard deviation (reduction n - 1) is taken.
        level: Two-sided level of the test.

    Returns:
        (t_{1 - level/2} + t_{0.8}) s / sqrt(n), with n - 1 degrees of freedom; NaN below two pairs.
    """
    freedom, _, error = _estimated(differences)
    two_sided, wanted = special.stdtrit(freedom, [1 - level / 2, 0.8])
    return float((two_sided + wanted) * error)


def t_test(differences: Sequence[float]) -> float:
    """Test a mean difference of 0 by Student's t.

    Args:
        differences: [n] paired differences.

    Returns:
        The two-sided p value; 1 where all differences are 0, 0 where all are another one; NaN below two.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2:
        return float("nan")
    if values.std() <= RESOLUTION * abs(values.mean()):
        return 1.0 if values[0] == 0 else 0.0
    freedom, mean, error = _estimated(differences)
    return float(2 * special.stdtr(freedom, -abs(mean) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values for multiple tests by Holm's step-down method.

    Args:
        p_values: The p values.

    Returns:
        The adjusted values, in the order given.
    """
    order = np.argsort(p_values)
    adjusted = np.empty(len(p_values))
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return [float(p) for p in adjusted]


def ratio_of_means(top: Sequence[float], bottom: Sequence[float]) -> Interval:
    """Compute mean(top) / mean(bottom) of pairs, with Fieller's interval (1954).

    The mean of the ratios is not used: it is biased, and has no bound if a single value of `bottom` is near zero.

    Args:
        top: [n] values.
        bottom: [n] values, paired with them.

    Returns:
        The ratio and its 95 % interval; unbounded if the mean of `bottom` may be zero, NaN limits below two pairs.
    """
    a, b = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    num = len(a)
    if num < 2:
        return Interval(float(a.mean() / b.mean()) if num else float("nan"), float("nan"), float("nan"))
    (aa, ab), (_, bb) = np.cov(a, b) / num
    t2 = special.stdtrit(num - 1, 0.975) ** 2
    # the r with (mean(a) - r mean(b))^2 <= t^2 Var(mean(a) - r mean(b)), a quadratic in r
    square, linear, constant = b.mean() ** 2 - t2 * bb, a.mean() * b.mean() - t2 * ab, a.mean() ** 2 - t2 * aa
    estimate = float(a.mean() / b.mean())
    if square <= 0:
        return Interval(estimate, float("-inf"), float("inf"))
    half = float(np.sqrt(max(linear**2 - square * constant, 0.0)))
    return Interval(estimate, float((linear - half) / square), float((linear + half) / square))


def two_batch_sizes(
    micro_batch_square: Any, window_square: Any, micro_batches: Any, window_samples: Any, population: float = math.inf
) -> tuple[Any, Any]:
    """Estimate the trace of the gradient covariance and the squared norm of the gradient from two batch sizes.

    S = (m - g) / (1/b - 1/B) and |G|^2 = g - S / B with b = B / N are unbiased (McCandlish et al. 2018, appendix A.1); all
    gradients are means over samples.

    Args:
        micro_batch_square: m, the mean of |g_b|^2 over the micro-batches; a number or a column.
        window_square: g = |g_B|^2 of the window.
        micro_batches: N.
        window_samples: B.
        population: Number D of samples from which the window is drawn without replacement. For D < inf, S / D is added to
            |G|^2.

    Returns:
        S = tr Sigma, and |G|^2.
    """
    trace = (micro_batch_square - window_square) * window_samples / (micro_batches - 1)
    return trace, window_square - trace / window_samples + trace / population
