"""How noisy is the gradient of a batch, how does that change along a training, and what do micro-batches say of it?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from accumulation_harness.analysis.answering import (
    BLUE,
    CONFIRMED,
    GREY,
    INK,
    ORANGE,
    REFUTED,
    UNDECIDED,
    VERMILLION,
    ClaimResult,
    Curve,
    Experiment,
    Interval,
    Material,
    Picture,
    Results,
    Section,
    Table,
    claim,
    curves,
    number,
    section,
    table,
    table_by,
    undecided,
)
from accumulation_harness.experiments.gradient_noise import fits as noise
from accumulation_harness.judge.statistics import mean_interval

SLOPE_MARGIN = 0.05  # of the mean slope around -1: from B = 4 to 1,024 this is a factor of 1.3 in the variance
FEWEST_DRAWS = 200  # batches of every size, as the claim itself asks
QUARTER = 0.25  # of a training
STRETCHES = 8  # parts of a training, for the estimates from its micro-batches
AT = ["trial", "step", "replacement"]
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))  # one for each seed
KINDS = {True: ("with replacement", BLUE, "o"), False: ("without", VERMILLION, "s")}


def scales(rows: DataFrame) -> DataFrame:
    """The rows with exact noise scales."""
    return rows.query("quantity == 'noise_scale'").astype({"windows": int})


def variances(rows: DataFrame) -> DataFrame:
    """The rows of drawn batches; `independent` is the variance that independent draws would have had."""
    own = rows.query("quantity == 'variance'").astype({"batch": int, "draws": int, "step": int})
    factor = (
        own["expected"] * own["batch"] / own.merge(scales(rows), on=["trial", "step"], how="left")["noise_trace_y"].to_numpy()
    )
    return own.assign(independent=own["variance"] / factor)


@claim(
    "C6",
    CONFIRMED,
    "Confirmed when the slope of log variance over log B is -1, with its 95% interval within "
    f"{SLOPE_MARGIN:g} of it, for {FEWEST_DRAWS} draws or more of each size.",
)
def falls_as_one_over_b(results: Results) -> ClaimResult:
    """C6: compares the slope of log variance over log B with -1, also without replacement after division by (D - B)/(D - 1)."""
    rows = variances(results.study("gradient_noise"))
    if rows["draws"].min() < FEWEST_DRAWS or rows["batch"].nunique() < 3 or rows["trial"].nunique() < 2:
        return undecided(f"It takes {FEWEST_DRAWS} draws of three sizes or more, in two trials or more.", len(rows))
    corrected = noise.slopes(rows, "independent", AT)
    plain = noise.slopes(rows[~rows["replacement"].astype(bool)], "variance", AT)
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


def _over_trials(slopes: DataFrame) -> Interval:
    """The mean slope over trials with its interval; points of one training are not independent, so they are averaged first."""
    return mean_interval(slopes.groupby("trial")["slope"].mean().tolist())


def _written(one: Interval) -> str:
    return f"{one.estimate:.3f}, {one.low:.3f} to {one.high:.3f}"


def quarters(rows: DataFrame) -> DataFrame:
    """B_simple of each trial in the `first` and the `last` quarter of its training: the ratio of the means over the points."""
    rows = scales(rows)
    end = rows.groupby("trial")["step"].transform("max")
    parts = {"first": rows["step"] <= QUARTER * end, "last": rows["step"] >= (1 - QUARTER) * end}
    sums = {name: rows[part].groupby("trial")[["noise_trace", "gradient_square"]].sum() for name, part in parts.items()}
    return DataFrame({name: own["noise_trace"] / own["gradient_square"] for name, own in sums.items()})


def growth(rows: DataFrame) -> str:
    """The noise scale in the last quarter over that in the first, over all trainings and by setting, in words."""
    found = quarters(rows)
    ratio = found["last"] / found["first"]
    one = mean_interval(np.log(ratio).tolist())
    return (
        "The noise scale, up to which theory lets a larger batch pay, is a proxy and not the benefit, which `batch_order` "
        f"measures. Last quarter over first: {math.exp(one.estimate):.2g} (geometric mean, 95% {math.exp(one.low):.2g} to "
        f"{math.exp(one.high):.2g}); {'; '.join(_by_setting(rows, ratio))}."
    )


def _by_setting(rows: DataFrame, ratio: Series) -> list[str]:
    """The range of `ratio` under each optimizer and normalisation, in words; the smallest first."""
    about = rows.groupby("trial")[["optimizer", "norm"]].first()
    setting = about["optimizer"] + ", norm=" + about["norm"]
    ranges = ratio.groupby(setting).agg(["min", "max", "size"]).sort_values("min")
    return [f"{name}: {low:.2g} to {high:.2g} (n = {n})" for name, low, high, n in ranges.itertuples()]


def figure_variance(rows: DataFrame, moments: Sequence[int]) -> Figure:
    """The trace of the batch gradient's covariance over B, a panel per moment: points are measured, lines are formulas."""
    panels: dict[str, list[Curve]] = {f"step {step}": [] for step in moments}
    for (step, replacement), own in rows.query("step in @moments").sort_values("batch").groupby(["step", "replacement"]):
        label, colour, mark = KINDS[bool(replacement)]
        look = {"color": colour, "marker": mark, "markerfacecolor": "none", "linestyle": "", "label": label}
        panels[f"step {step}"] += [
            Curve(own["batch"], own["expected"], {"color": colour}),
            Curve(own["batch"], own["variance"], look),
        ]
    return curves(panels, "batch B", "variance of the gradient")


def figure_noise_scale(panels: Mapping[str, Sequence[tuple[DataFrame, DataFrame]]]) -> Figure:
    """B_simple over the training, a panel per title; for every seed the exact values (lines) and the stretches' (bars)."""
    drawn: dict[str, list[Curve]] = {title: [] for title in panels}
    for title, seeds in panels.items():
        for place, (exact, estimated) in enumerate(seeds):
            look = {"color": INK, "alpha": 0.8, "linestyle": DASHES[place % len(DASHES)], "label": "from every sample's gradient"}
            shown = estimated.query("estimate > 0")
            open_end = ~np.isfinite(shown["high"])
            closed, without = shown[~open_end], shown[open_end]
            bars = np.clip([closed["estimate"] - closed["low"].clip(lower=1.0), closed["high"] - closed["estimate"]], 0, None)
            orange = {"color": ORANGE, "marker": "o", "linestyle": "", "label": "from the micro-batches alone, 95%"}
            grey = {"color": GREY, "marker": "^", "linestyle": "", "label": "the same, without an upper end"}
            drawn[title] += [
                Curve(exact["step"], exact["noise_trace"] / exact["gradient_square"], look),
                Curve(closed["step"], closed["estimate"], orange, bars),
                Curve(without["step"], without["estimate"], grey),
            ]
    figure = curves(drawn, "optimizer step", "noise scale, samples", axes=("linear", "log"), columns=3)
    lowest, highest = figure.axes[0].get_ylim()
    figure.axes[0].set_ylim(max(lowest, 1.0), min(highest, 1e5))
    return figure


def variance_section(material: Material) -> Section:
    """The variance of the batch gradient over B, beside both formulas."""
    rows = variances(material.study("gradient_noise"))
    own = rows[rows["trial"] == min(rows["trial"])]
    steps = sorted(set(own["step"]))
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    columns = (("replacement", {True: "with", False: "without"}.get), "batch", "off n", "off mean", "off min", "off max")
    picture = Picture(
        "variance",
        figure_variance(own, chosen),
        "Variance of the batch gradient over the batch size at three moments of a training, with the lines of both formulas.",
        f"Variance of the gradient (trace of its covariance) over B at three moments of one training ({own['trial'].iloc[0]}), "
        f"{own['draws'].min()} batches a point. Lines: S/B and S/B·(D - B)/(D - 1), with S from the gradients of all "
        "samples; nothing is fitted.",
    )
    head = "replacement | B | points | mean of measured/formula | smallest | largest"
    caption = (
        "Measured over predicted variance, over all trials and moments. It does not cover other data sets, or samples that "
        "depend on one another."
    )
    rows = rows.assign(off=rows["variance"] / rows["expected"])
    cells = table_by(rows, "replacement batch", head, columns, caption, folded=True)
    return section("The variance falls as 1/B", picture, cells)


def noise_section(material: Material) -> Section:
    """The noise scale along each training, exact and estimated from micro-batches."""
    rows = scales(material.study("gradient_noise"))
    steps = material.read_steps(sorted(set(rows["trial"])))
    panels: dict[str, list[tuple[DataFrame, DataFrame]]] = {}
    pooled = []
    for (norm, optimizer), trials in rows.groupby(["norm", "optimizer"]):
        for trial, exact in trials.groupby("trial"):
            estimates = noise.two_size(steps[steps["trial"] == trial], population=exact["population"].iloc[0])
            panels.setdefault(f"{optimizer}, norm {norm}", []).append((exact, noise.stretches(estimates, STRETCHES)))
            pooled.append(estimates)
    every = pd.concat(pooled)
    negative = (every["gradient_square"] <= 0).mean()
    text = (
        f"Every accumulated run logs two squared norms of a window. Of {len(every)} single windows {negative:.0%} give a "
        "negative |G|²: therefore means over steps are divided, and ratios of single steps are never averaged."
    )
    picture = Picture(
        "noise-scale",
        figure_noise_scale(panels),
        "The gradient noise scale over the training, exact and estimated from micro-batches.",
        f"Noise scale tr Σ / |G|² along the training, a line per seed. Points: the ratio of means over an {STRETCHES}th of the "
        "training, from its own micro-batches while the weights move; bars: Fieller's 95% interval; grey triangles: intervals "
        "without an upper end.",
    )
    return section("The noise scale along the training", text, picture, growth(rows), _standing(rows))


def _standing(rows: DataFrame) -> Table:
    """The estimator from micro-batches beside exact values at fixed weights."""
    estimates = noise.two_size(rows.drop(columns=["noise_trace", "gradient_square"]))
    trace = estimates["noise_trace"] / rows.loc[estimates.index, "noise_trace"]
    square = estimates["gradient_square"] / rows.loc[estimates.index, "gradient_square"]
    error = number(rows["loop_error"].max())
    cells = (
        (name, len(ratio), ratio.mean(), *(f"{ratio.quantile(q):.3f}" for q in (0.05, 0.5, 0.95)))
        for name, ratio in (("tr Σ", trace), ("|G|²", square))
    )
    caption = (
        f"The two-size estimate over the exact value at the same weights, {rows['windows'].min()} windows a point, drawn with "
        f"replacement. The loop's gradient is the mean of its samples' gradients to {error}, relative, in every window."
    )
    return table("estimate | points | mean ratio | 5% | median | 95%", cells, caption)


EXPERIMENT = Experiment(
    title="How noisy is the gradient of a batch, and how does that change along a training?",
    question="Does the variance of a batch's gradient fall as 1/B? How does its noise scale change along a training? Can the "
    "micro-batches of an accumulated run tell?",
    prediction="The variance falls as 1/B for independent samples, and as (1/B)(D - B)/(D - 1) for samples drawn without "
    "replacement. The noise scale tr Σ/|G|² grows along the training. Micro-batches estimate it "
    "without bias.",
    rule="Per-sample gradients in float64 are the truth. The mean slope of log variance over log B has to be within "
    f"{SLOPE_MARGIN:g} of -1 with its 95% interval. The growth of the noise scale is shown, and decides nothing.",
    claims=(falls_as_one_over_b,),
    sections=(variance_section, noise_section),
)
