"""Shares of counts with their exact intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from pandas import Series
from scipy import special

LEVEL = 0.95


@dataclass(frozen=True)
class Rate:
    """k of n, with its exact 95 % interval (Clopper and Pearson 1934); NaN for n = 0."""

    k: int
    n: int

    @property
    def share(self) -> float:
        """The measured share, k / n."""
        return self.k / self.n if self.n else math.nan

    @property
    def low(self) -> float:
        """The lower end of the interval: a quantile of Beta(k, n - k + 1)."""
        if not self.n:
            return math.nan
        return float(special.betaincinv(self.k, self.n - self.k + 1, (1 - LEVEL) / 2)) if self.k else 0.0

    @property
    def high(self) -> float:
        """The upper end of the interval: a quantile of Beta(k + 1, n - k)."""
        if not self.n:
            return math.nan
        return float(special.betaincinv(self.k + 1, self.n - self.k, (1 + LEVEL) / 2)) if self.k < self.n else 1.0

    @property
    def interval(self) -> str:
        """The interval in words; a dash for n = 0."""
        return f"{percent(self.low)} to {percent(self.high)}" if self.n else "-"

    def __str__(self) -> str:
        return f"{self.k} of {self.n} ({percent(self.share)}, 95% interval {self.interval})" if self.n else "0 of 0"


def rate(flags: Series[bool]) -> Rate:
    """The share of flags that are true.

    Args:
        flags: One for each draw.

    Returns:
        k of n, with its exact interval.
    """
    return Rate(int(flags.sum()), len(flags))


def percent(value: float) -> str:
    """A share in percent with three digits, or two digits of its distance to 1: 94.6%, 0.341%, 99.997%. Only 1 itself is 100%.

    Args:
        value: A share of 0 to 1.

    Returns:
        A text.
    """
    if 0.99 < value < 1:
        return f"{100 - Decimal(f'{100 * (1 - value):.2g}'):f}%"
    return f"{100 * value:.3g}%"


def of_trials(flags: Series[bool], trials: Series[str]) -> Rate:
    """The share of trials in which every flag is true: arms of a trial share its data and weights, and are no separate draws.

    Args:
        flags: One for each arm.
        trials: The trial of each arm.

    Returns:
        k of n trials.
    """
    return rate(flags.astype(bool).groupby(trials).all())
