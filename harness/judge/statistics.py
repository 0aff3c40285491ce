"""Intervals and tests on small samples by scipy, whose import costs a second: trials do without (`resampling.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from harness.judge.resampling import Interval


def mean_interval(differences: Sequence[float], *, level: float = 0.95) -> Interval:
    """Mean and its Student t interval; NaN limits below two values."""
    values = np.asarray(differences, dtype=np.float64)
    mean = float(values.mean()) if len(values) else float("nan")
    if len(values) < 2:
        return Interval(mean, float("nan"), float("nan"))
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)


def median_interval(values: Sequence[float], *, level: float = 0.9) -> Interval:
    """Median and the order statistics that hold it with at least that confidence, whatever the distribution.

    Below log2(2 / (1 - level)) values, five at 90 %, there are none: all of their range, which is less sure.
    """
    sample = np.asarray(values, dtype=np.float64)
    found = stats.quantile_test(sample, p=0.5).confidence_interval(level)
    low, high = (sample.min(), sample.max()) if np.isnan(found.low) else (found.low, found.high)
    return Interval(float(np.median(sample)), float(low), float(high))


def equivalence_p(differences: Sequence[float], margin: float) -> float:
    """TOST p value of |mean difference| < margin for paired differences (Lakens 2017): the larger of two one-sided t tests.

    NaN below two pairs; 0 or 1 when all differences are the same.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2:
        return float("nan")
    error = values.std(ddof=1) / np.sqrt(len(values))
    if error == 0:
        return 0.0 if abs(values.mean()) < margin else 1.0
    freedom = len(values) - 1
    below = stats.t.sf((values.mean() + margin) / error, freedom)
    above = stats.t.cdf((values.mean() - margin) / error, freedom)
    return float(max(below, above))


def dispersion_ratio(differences: Sequence[float], null: Sequence[float]) -> tuple[float, float]:
    """F = s^2(differences) / s^2(null) and its one-sided p value under equal variances (F distribution, n - 1 degrees each).

    Both samples are paired differences against the same full batch; a null without spread gives (inf or NaN, NaN).
    """
    a, b = np.asarray(differences, dtype=np.float64), np.asarray(null, dtype=np.float64)
    if len(a) < 2 or len(b) < 2:
        return float("nan"), float("nan")
    above, below = a.var(ddof=1), b.var(ddof=1)
    if below == 0:
        return (float("inf") if above > 0 else float("nan")), float("nan")
    ratio = float(above / below)
    return ratio, float(stats.f.sf(ratio, len(a) - 1, len(b) - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p values, in the order given."""
    order = np.argsort(p_values)
    adjusted = np.empty(len(p_values))
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return [float(p) for p in adjusted]


def ratio_of_means(top: Sequence[float], bottom: Sequence[float], *, level: float = 0.95) -> Interval:
    """mean(top) / mean(bottom) of pairs with Fieller's interval (1954); unbounded where the bottom's mean may be zero.

    Never the mean of the ratios: that is biased, and has no bound where a single bottom comes near zero.
    """
    a, b = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    num = len(a)
    if num < 2:
        return Interval(float(a.mean() / b.mean()) if num else float("nan"), float("nan"), float("nan"))
    (aa, ab), (_, bb) = np.cov(a, b) / num
    t2 = stats.t.ppf((1 + level) / 2, num - 1) ** 2
    # the r with (mean(a) - r mean(b))^2 <= t^2 Var(mean(a) - r mean(b)), a quadratic in r
    square, linear, constant = b.mean() ** 2 - t2 * bb, a.mean() * b.mean() - t2 * ab, a.mean() ** 2 - t2 * aa
    estimate = float(a.mean() / b.mean())
    if square <= 0:
        return Interval(estimate, float("-inf"), float("inf"))
    half = float(np.sqrt(max(linear**2 - square * constant, 0.0)))
    return Interval(estimate, float((linear - half) / square), float((linear + half) / square))
