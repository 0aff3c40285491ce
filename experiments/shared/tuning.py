"""Trainings whose learning rates other seeds choose: seeds from TUNING_SEEDS on choose, the others judge. No trial does both."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pandas import DataFrame

from accumulation_harness.config import TUNING_SEEDS

LEVEL = 0.05
FEWEST_SEEDS = 5  # that judge: fewer are shown, and compared without a verdict
FEWEST_SETTINGS = 2  # that advice and a claim rest on: one says nothing of another
DETECTABLE = "Detectable: the mean difference that a paired t test would have found with 80% power."
LONGEST = "Of several lengths in one store the longest trainings count."


def longest(rows: DataFrame, by: Sequence[str]) -> DataFrame:
    """Of each kind (`by`) the trainings of most windows: a quick grid in the same store has shorter ones, which are others."""
    return rows[rows["steps"] == rows.groupby([*by])["steps"].transform("max")]


def best_rates(rows: DataFrame, by: Sequence[str], measure: str = "validation_loss") -> DataFrame:
    """`lr`, whose mean of `measure` is the lowest of each kind (`by`), where NaN is the worst; `interior`: inside the grid."""
    losses = rows.assign(loss=rows[measure].astype(float).fillna(math.inf))
    means = losses.groupby([*by, "lr"], as_index=False).agg(loss=("loss", "mean"))
    kinds = means.groupby([*by])
    ends = kinds["lr"].transform("min"), kinds["lr"].transform("max")
    means["interior"] = (means["lr"] > ends[0]) & (means["lr"] < ends[1])
    return means.loc[kinds["loss"].idxmin(), [*by, "lr", "interior"]]


def at_best_rate(rows: DataFrame, by: Sequence[str], measure: str = "validation_loss") -> DataFrame:
    """The rows of each kind (`by`) at its `best_rates`, with `interior` of that rate."""
    return rows.merge(best_rates(rows, by, measure), on=[*by, "lr"])


def at_tuned_rate(rows: DataFrame, by: Sequence[str], measure: str = "validation_loss") -> DataFrame:
    """The rows of the judging seeds, each kind (`by`) at its `best_rates` over the tuning seeds, with `interior`."""
    best = best_rates(rows.query(f"seed >= {TUNING_SEEDS}"), by, measure)
    return rows.query(f"seed < {TUNING_SEEDS}").merge(best, on=[*by, "lr"])
