"""How noisy is the gradient of a batch?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import (
    CONFIRMED,
    REFUTED,
    UNDECIDED,
    ClaimResult,
    Experiment,
    Interval,
    Material,
    Picture,
    Results,
    Section,
    claim,
    curves,
    formula,
    lines,
    number,
    points,
    section,
    span,
    undecided,
)
from accumulation_harness.judge.statistics import mean_interval

SLOPE_MARGIN = 0.05  # of the mean slope around -1: from B = 4 to 1,024 this is a factor of 1.3 in the variance
FEWEST_DRAWS = 200  # batches of every size, as the claim itself asks
AT = ["trial", "step", "replacement"]
KINDS = {True: "with replacement", False: "without"}


def _variances(rows: DataFrame) -> DataFrame:
    """The rows of drawn batches; `independent` is the variance that independent draws would have had."""
    own = rows.query("quantity == 'variance'").astype({"batch": int, "draws": int, "step": int})
    spread = own["expected"] * own["batch"]  # tr Sigma of draws with replacement, (D - B) / (D - 1) times that without
    factor = spread / spread.groupby([own["trial"], own["step"]]).transform("max")
    return own.assign(independent=own["variance"] / factor)


@claim(
    "C6",
    CONFIRMED,
    "Confirmed when the slope of log variance over log B is -1, with its 95% interval within "
    f"{SLOPE_MARGIN:g} of it, for {FEWEST_DRAWS} draws or more of each size.",
)
def falls_as_one_over_b(results: Results) -> ClaimResult:
    """C6: compares the slope of log variance over log B with -1, also without replacement after division by (D - B)/(D - 1)."""
    rows = _variances(results.study("gradient_noise"))
    if rows["draws"].min() < FEWEST_DRAWS or rows["batch"].nunique() < 3 or rows["trial"].nunique() < 2:
        return undecided(f"It takes {FEWEST_DRAWS} draws of three sizes or more, in two trials or more.", len(rows))
    corrected = _slopes(rows, "independent", AT)
    plain = _slopes(rows[~rows["replacement"].astype(bool)], "variance", AT)
    kinds = {kind: _over_trials(own) for kind, own in corrected.groupby("replacement")}
    uncorrected = _over_trials(plain)
    inside = all(one.low >= -1 - SLOPE_MARGIN and one.high <= -1 + SLOPE_MARGIN for one in kinds.values())
    outside = all(one.low > -1 + SLOPE_MARGIN or one.high < -1 - SLOPE_MARGIN for one in kinds.values())
    drawn = kinds[True]
    return ClaimResult(
        verdict=CONFIRMED if inside else REFUTED if outside else UNDECIDED,
        measured=drawn.estimate,
        threshold=f"slope -1 ± {SLOPE_MARGIN:g}",
        n=int(rows["draws"].sum()),
        explanation=f"Independent samples: slope {_written(drawn)} (mean over trials, 95%). Without replacement the variance "
        f"falls faster ({_written(uncorrected)}), and as 1/B again ({_written(kinds[False])}) once divided by (D - B)/(D - 1).",
    )


def _slopes(rows: DataFrame, value: str, by: list[str]) -> DataFrame:
    """Least-squares slope of log `value` over log `batch` in each group of `by`, in a column `slope`."""
    logs = rows[["batch", value]].astype(float).apply(np.log).join(rows[by])
    return tables.cells(logs, by, lambda own: {"slope": np.polyfit(own["batch"], own[value], 1)[0]})


def _over_trials(slopes: DataFrame) -> Interval:
    """The mean slope over trials with its interval; points of one training are not independent, so they are averaged first."""
    return mean_interval(slopes.groupby("trial")["slope"].mean().tolist())


def _written(one: Interval) -> str:
    return f"{one.estimate:.3f}, {one.low:.3f} to {one.high:.3f}"


def _figure_variance(rows: DataFrame, moments: Sequence[int]) -> Figure:
    """The trace of the batch gradient's covariance over B, a panel per moment: points are measured, lines are formulas."""
    panels = {
        f"step {step}": [
            *lines(own, "replacement", "batch", "variance", KINDS.get, points),
            *formula(own, "replacement", "batch", "expected"),
        ]
        for step, own in rows.query("step in @moments").groupby("step")
    }
    return curves(panels, "batch B", "variance of the gradient")


def _variance_section(material: Material) -> Section:
    """The variance of the batch gradient over B, beside both formulas."""
    rows = _variances(material.study("gradient_noise"))
    own = rows[rows["trial"] == min(rows["trial"])]
    steps = sorted(set(own["step"]))
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    picture = Picture(
        "variance",
        _figure_variance(own, chosen),
        "Variance of the batch gradient over the batch size at three moments of a training, with the lines of both formulas.",
        f"Variance of the gradient (trace of its covariance) over B at three moments of one training ({own['trial'].iloc[0]}), "
        f"{own['draws'].min()} batches a point. Lines: S/B and S/B·(D - B)/(D - 1), with S from the gradients of all "
        "samples; nothing is fitted.",
    )
    off = rows["variance"] / rows["expected"]
    text = (
        f"Measured over predicted variance, over all trials and moments: {number(off.mean())} in the mean, {span(off)}. It does "
        "not cover other data sets, or samples that depend on one another."
    )
    return section("The variance falls as 1/B", text, picture)


EXPERIMENT = Experiment(
    title="How noisy is the gradient of a batch?",
    question="Does the variance of a batch's gradient fall as 1/B, wherever in a training?",
    prediction="The variance falls as 1/B for independent samples, and as (1/B)(D - B)/(D - 1) for samples drawn without "
    "replacement.",
    rule="Per-sample gradients in float64 are the truth. The mean slope of log variance over log B has to be within "
    f"{SLOPE_MARGIN:g} of -1 with its 95% interval.",
    claims=(falls_as_one_over_b,),
    sections=(_variance_section,),
)
