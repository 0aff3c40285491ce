"""The sequential test of L1: after how many permutations is it decided whether an arm rounds within the gate?

Errors of the arm and of the full batch are compared at a few looks. At each there are exact limits of their ratio; measuring
stops when both lie on one side of the gate. What the limits may err is spent over the looks, so that with at least 95 %
probability all of them hold, whenever it stops (Bonferroni over the looks; Lan and DeMets 1983 on spending).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

# Permutations -> probability that the limit on one side errs.
EARLY_LOOKS: Mapping[int, float] = {6: 0.002, 10: 0.003, 15: 0.004, 22: 0.006}
LAST_LOOK = 0.010  # the same when no permutation is left; together 0.025 on each side
EXACT_SIZE = 50  # up to which U is counted; beyond, the normal distribution's C is smaller by up to 0.5 %, on the safe side


def spent(permutations: int, most: int, early: Mapping[int, float] = EARLY_LOOKS) -> float | None:
    """Return the error probability that a sequential test may spend at a look.

    Args:
        permutations: Permutations that have been made.
        most: The largest number of permutations.
        early: By number of permutations, the error probability of each early look.

    Returns:
        The probability for each limit; None if there is no look at this number.
    """
    return LAST_LOOK if permutations == most else early.get(permutations)


def ratio_limits(top: Sequence[float], bottom: Sequence[float], alpha: float) -> tuple[float, float]:
    """Compute confidence limits of the factor r by which `top` is distributed as r times `bottom`.

    The limits invert the test of Mann and Whitney: with C the largest number for which P(U < C) <= alpha, they are the C-th
    smallest and the C-th largest of the m n ratios.

    Args:
        top: [m] positive errors.
        bottom: [n] positive errors.
        alpha: The largest probability that one limit is wrong.

    Returns:
        (lower, upper); (0, inf) if there are too few values.
    """
    rank = _critical(len(top), len(bottom), alpha)
    if rank < 1:
        return 0.0, float("inf")
    return 1 / _ordered_ratio(bottom, top, rank), _ordered_ratio(top, bottom, rank)


def _ordered_ratio(top: Sequence[float], bottom: Sequence[float], rank: int) -> float:
    """The `rank`-th largest of all top_i / bottom_j, to the last digits: by bisection, since there may be 10^8 of them."""
    above, below = (np.sort(np.log(np.maximum(values, np.finfo(np.float64).tiny))) for values in (top, bottom))
    low, high = above[0] - below[-1], above[-1] - below[0]
    for _ in range(64):
        middle = (low + high) / 2
        num_larger = int(np.searchsorted(below, above - middle, side="left").sum())  # pairs with top_i / bottom_j > e^middle
        low, high = (middle, high) if num_larger >= rank else (low, middle)
    return float(np.exp(high))


@cache
def _critical(m: int, n: int, alpha: float) -> int:
    """The largest C with P(U < C) <= alpha, where samples of m and n have one distribution."""
    if m == 0 or n == 0:
        return 0
    if max(m, n) <= EXACT_SIZE:
        ways = _ways(m, n)
        return int(np.searchsorted(np.cumsum(ways) / ways.sum(), alpha, side="right"))
    normal = statistics.NormalDist(m * n / 2, math.sqrt(m * n * (m + n + 1) / 12))
    return max(0, math.floor(normal.inv_cdf(alpha) + 0.5))


@cache
def _ways(m: int, n: int) -> NDArray[np.float64]:
    """[m n + 1]: in how many orders of the m + n values U, the number of pairs in which the first sample is larger, is u."""
    ways = np.zeros(m * n + 1)
    if m == 0 or n == 0:
        return np.ones(1)
    beside, without = _ways(m - 1, n), _ways(m, n - 1)
    ways[n:] += beside  # the largest of all values is of the first sample: larger than all n of the second
    ways[: len(without)] += without
    return ways
