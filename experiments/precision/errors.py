"""Measurements of number formats as frames: rounding errors of accumulators, and windows under a loss scale."""

from __future__ import annotations

import pandas as pd

from accumulation_harness.analysis.load import Results
from accumulation_harness.judge.gates import ALGEBRA_GATE

NOTICEABLE = 10.0  # times the full batch's own rounding: one decimal digit is lost
FLOAT16_ERROR = 0.05  # relative, of one gradient under float16 autocast, in which a rounding can flip a ReLU


def errors(results: Results) -> pd.DataFrame:
    """The rows of the study `accumulators` that hold errors."""
    rows = results.study("accumulators")
    return rows.query("quantity == 'error'")


def growth(rows: pd.DataFrame) -> pd.Series[float]:
    """Error at the largest N over that at the smallest N above 1, of each trial and accumulator."""
    split = rows.query("accumulation_steps > 1").sort_values("accumulation_steps")
    ends = split.groupby(["trial", "accumulator"])["arm_error"].agg(["first", "last"])
    return ends["last"] / ends["first"]


def scaling(results: Results) -> pd.DataFrame:
    """The rows of the study `loss_scaling`, with `right`: both finite windows are `exact`, the overflowing one skipped `once`.

    In float64, exact means within the gate of L0. In float16 a flipped ReLU can make even the full batch's error large: there an
    error is too large only above both FLOAT16_ERROR and NOTICEABLE times the full batch's.
    """
    own = results.study("loss_scaling")
    exact = (own["steps"] == 1) & (own["steps_after"] == 1)
    for error in ("error", "error_after"):
        of_full = own[error].where(own["arm"] == "full").groupby([own["trial"], own["width"]]).transform("max").fillna(0.0)
        rough = (NOTICEABLE * of_full).clip(lower=FLOAT16_ERROR)
        exact &= own[error] <= rough.where(own["width"] == "float16", ALGEBRA_GATE)
    skipped = (own["steps_when_hit"] == 0) & (own["scale_factor"] == 0.5) & ~own["moved"].astype(bool)
    return own.assign(exact=exact, once=skipped, right=exact & skipped)
