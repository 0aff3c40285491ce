"""Trainings whose learning rates other seeds choose: seeds from TUNING_SEEDS on choose, the others judge. No trial does both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pandas import DataFrame

from accumulation_harness.config import TUNING_SEEDS
from accumulation_harness.judge import statistics
from accumulation_harness.judge.interval import Interval

LEVEL = 0.05
FEWEST_SEEDS = 5  # that judge: fewer are shown, and compared without a verdict
FEWEST_SETTINGS = 2  # that advice and a claim rest on: one says nothing of another
DETECTABLE = "Detectable: the mean difference that a paired t test would have found with 80% power."
LONGEST = "Of several lengths in one store the longest trainings count."


def longest(rows: DataFrame, by: Sequence[str]) -> DataFrame:
    """Keep the longest trainings of each kind: a quick grid in the same store has shorter ones.

    Args:
        rows: Trainings, with a column `steps`.
        by: Columns that make a kind.

    Returns:
        The rows.
    """
    return rows[rows["steps"] == rows.groupby([*by])["steps"].transform("max")]


def best_rates(rows: DataFrame, by: Sequence[str], measure: str = "validation_loss") -> DataFrame:
    """`lr`, whose mean of `measure` is the lowest of each kind (`by`), where NaN is the worst; `interior`: inside the grid.

    Args:
        rows: Trainings, with a column `lr`.
        by: Columns that make a kind.
        measure: The lower the better.

    Returns:
        A row for each kind.
    """
    losses = rows.assign(loss=rows[measure].astype(float).fillna(math.inf))
    means = losses.groupby([*by, "lr"], as_index=False).agg(loss=("loss", "mean"))
    kinds = means.groupby([*by])
    ends = kinds["lr"].transform("min"), kinds["lr"].transform("max")
    means["interior"] = (means["lr"] > ends[0]) & (means["lr"] < ends[1])
    return means.loc[kinds["loss"].idxmin(), [*by, "lr", "interior"]]


def at_best_rate(rows: DataFrame, by: Sequence[str], measure: str = "validation_loss") -> DataFrame:
    """The rows of each kind (`by`) at its `best_rates`, with `interior` of that rate.

    Args:
        rows: Trainings, with a column `lr`.
        by: Columns that make a kind.
        measure: The lower the better.

    Returns:
        The rows.
    """
    return rows.merge(best_rates(rows, by, measure), on=[*by, "lr"])


def at_tuned_rate(rows: DataFrame, by: Sequence[str], measure: str = "validation_loss") -> DataFrame:
    """The rows of the judging seeds, each kind (`by`) at its `best_rates` over the tuning seeds, with `interior`.

    Args:
        rows: Trainings, with columns `lr` and `seed`.
        by: Columns that make a kind.
        measure: The lower the better.

    Returns:
        The rows.
    """
    best = best_rates(rows.query(f"seed >= {TUNING_SEEDS}"), by, measure)
    return rows.query(f"seed < {TUNING_SEEDS}").merge(best, on=[*by, "lr"])


@dataclass(frozen=True)
class Contrast:
    """One training less another in a setting, paired by seed."""

    key: tuple[Any, ...]  # the setting
    rows: DataFrame  # by seed: of what is compared the differences, of the rest both values (the other's: `*_of`)

    def of(self, value: str = "test_loss") -> list[float]:
        """The differences."""
        return self.rows[value].dropna().tolist()

    def interval(self, level: float, value: str = "test_loss") -> Interval:
        """Of their mean."""
        return statistics.mean_interval(self.of(value), level=level)

    @property
    def is_usable(self) -> bool:
        """Whether it may decide: enough judging seeds, and both rates inside the grid."""
        return bool(self.rows["interior"].all()) and len(self.of()) >= FEWEST_SEEDS


def contrasts(
    rows: DataFrame, others: DataFrame, setting: Sequence[str], values: Sequence[str], by: Sequence[str] = ()
) -> list[Contrast]:
    """The rows less the others of the same setting and seed, for each setting (and kind of the rows, `by`) that has both.

    Args:
        rows: Trainings.
        others: What they are compared with.
        setting: Columns that have to be the same.
        values: Columns of which the difference is taken.
        by: Columns that make a kind of the rows.

    Returns:
        One for each setting and kind, with differences by seed.
    """
    both = rows.merge(others, on=[*setting, "seed"], suffixes=("", "_of"))
    less = {value: both[value].astype(float) - both[f"{value}_of"].astype(float) for value in values}
    both = both.assign(**less, interior=both["interior"] & both["interior_of"])
    return [Contrast(key, own) for key, own in both.groupby([*setting, *by])]
