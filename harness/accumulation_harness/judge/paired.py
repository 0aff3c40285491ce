"""Two trainings beside each other, paired by seed: the same, different, or undecided, and how many seeds would decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from accumulation_harness.judge import statistics
from accumulation_harness.judge.interval import Interval
from accumulation_harness.system.enums import StrEnum

LEVEL = 0.05
MOST_SEEDS = 10_000  # beyond, nobody trains so many

Margin = Callable[[int], float]  # by the number of seeds: the difference up to which two trainings count as the same


class Comparison(StrEnum):
    """The result of comparing two trainings over seeds."""

    same = "same"  # by TOST within the margin
    below = "lower"
    above = "higher"
    undecided = "undecided"


def half_spread(values: Sequence[float]) -> Margin:
    """Return a margin of half the standard deviation between seeds.

    The margin at n seeds is s sqrt((n - 1) / q) / 2, where s is the sample standard deviation (with reduction n - 1) of
    `values` and q the 95 % quantile of chi^2(n - 1): half of the lower confidence limit of the deviation. With few seeds it is
    small, so that a difference is not called none only because few seeds happened to spread widely.

    Args:
        values: The metric of the control, one per seed.

    Returns:
        A function from the number of seeds to the margin; NaN for one seed.
    """
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan

    def margin(seeds: int) -> float:
        return 0.5 * spread * math.sqrt((seeds - 1) / special.chdtri(seeds - 1, LEVEL)) if seeds > 1 else math.nan

    return margin


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Differences between two trainings, one per seed, with the margin below which a difference counts as none."""

    differences: tuple[float, ...]
    margin_at: Margin
    level: float = LEVEL  # of each of its tests
    p: float = math.nan  # of no difference, corrected where several are compared; NaN: not tested
    compared: int = 1  # tests of no difference that share the level

    @property
    def margin(self) -> float:
        """At the seeds that there are."""
        return self.margin_at(len(self.differences))

    @property
    def interval(self) -> Interval:
        """Of the mean difference, at the level."""
        return statistics.mean_interval(self.differences, level=1 - self.level)

    @property
    def same_p(self) -> float:
        """TOST within the margin."""
        return statistics.equivalence_p(self.differences, self.margin)

    @property
    def detectable(self) -> float:
        """The smallest mean difference that as many seeds find in 80 of 100 cases, whatever the other tests say."""
        return statistics.detectable(self.differences, self.level / self.compared)

    @property
    def verdict(self) -> Comparison:
        """`same` only by TOST, `lower` and `higher` only by the corrected test, else `undecided`."""
        if self.same_p < self.level:
            return Comparison.same
        if self.p < self.level:
            return Comparison.below if self.interval.estimate < 0 else Comparison.above
        return Comparison.undecided

    @property
    def deciding_seeds(self) -> int | None:
        """So many find a difference as large as the margin in 80 of 100 cases; None where MOST_SEEDS do not.

        detectable(n) = detectable sqrt(m / n) <= margin(n), with the quantiles of the m pairs that there are: what these few say
        of the spread may be too small, and Student's t at m - 1 makes up for it (Stein 1945).
        """
        num, found = len(self.differences), self.detectable
        fits = (n for n in range(num, MOST_SEEDS) if found * math.sqrt(num / n) <= self.margin_at(n))
        return next(fits, None) if num > 1 else None


def corrected(found: Sequence[Paired]) -> list[Paired]:
    """Correct paired t tests for multiple comparisons by Holm's method.

    Only comparisons whose spread over seeds leaves a doubt take part in the correction. If a training differs from seed to seed
    by far less than the margin, as with pure rounding, its result is certain. The spread decides this and not the mean, because
    choosing by the mean would bias the test.

    Args:
        found: The comparisons.

    Returns:
        The same, with p values and the number of tests that share the level.
    """
    each = [statistics.t_test(one.differences) for one in found]
    doubtful = [not 2 * one.detectable < one.margin and not math.isnan(p) for one, p in zip(found, each, strict=True)]
    by_holm = iter(statistics.holm([p for p, is_so in zip(each, doubtful, strict=True) if is_so]))
    corrected = [next(by_holm) if is_so else p * len(found) for p, is_so in zip(each, doubtful, strict=True)]
    compared = max(1, sum(doubtful))
    return [replace(one, p=p, compared=compared) for one, p in zip(found, corrected, strict=True)]
