"""Resampling of small samples: numpy alone, every draw from a seed that is passed in. What a trial itself needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """An estimate between the ends of its confidence interval."""

    estimate: float
    low: float
    high: float


def ratio_of_medians(top: Sequence[float], bottom: Sequence[float], *, seed: int, draws: int = 2000) -> Interval:
    """median(top) / median(bottom) with its percentile-bootstrap 95 % interval; the two samples are drawn independently."""
    rng = np.random.default_rng(seed)
    above, below = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    tops = np.median(rng.choice(above, (draws, len(above))), axis=1)
    bottoms = np.median(rng.choice(below, (draws, len(below))), axis=1)
    low, high = np.quantile(tops / bottoms, (0.025, 0.975))
    return Interval(float(np.median(above) / np.median(below)), float(low), float(high))


def permutation_rank(observed: float, null: Sequence[float]) -> float:
    """p = (1 + #{null >= observed}) / (K + 1); its smallest value is 1 / (K + 1), so 0.01 needs K >= 99."""
    return (1 + sum(value >= observed for value in null)) / (len(null) + 1)
