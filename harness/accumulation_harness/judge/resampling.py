"""What a trial itself needs of statistics, without scipy: an interval's form, and the rank of a permutation test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float


def permutation_rank(observed: float, null: Sequence[float]) -> float:
    """Compute the p value of a permutation test, p = (1 + #{null >= observed}) / (K + 1).

    Args:
        observed: The statistic.
        null: [K] the statistic under permutations.

    Returns:
        p, which is at least 1 / (K + 1); p = 0.01 needs K >= 99.
    """
    return (1 + sum(value >= observed for value in null)) / (len(null) + 1)
