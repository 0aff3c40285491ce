"""Figures of BatchNorm: what its statistics do to gradient and buffers over b, and what accuracy over b says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import EXACT
from accumulation_harness.analysis.figures.forms import Curve, curves, mean_curve, median_curve
from accumulation_harness.analysis.figures.style import BLUE, GREEN, ORANGE, SERIES, VERMILLION, power_of_ten
from accumulation_harness.judge.gates import ALGEBRA_GATE

NAMES = {"mlp": "perceptron", "conv": "convolutions"}  # models as the page calls them
CURVES = (
    ("gradient_error", "accumulated", VERMILLION, "X", "accumulated"),
    ("bias", "accumulated", ORANGE, "^", "of it: common to all cuts (bias)"),
    ("oracle_error", "accumulated", GREEN, "D", "accumulated, against Ghost BatchNorm"),
    ("gradient_error", "two_pass_statistics", BLUE, "o", "two-pass statistics"),
)
NORMS = {"batch": (VERMILLION, "X"), "group": (BLUE, "o"), "layer": (GREEN, "D")}


def figure_gradient_over_b(rows: pd.DataFrame) -> Figure:
    """Relative gradient error over b, a panel for each model and moment; medians and ranges over trials."""
    panels = {
        f"{NAMES.get(str(model), model)}\n{f'after {after:.0f} steps' if after else 'initial weights'} "
        f"(n = {own['trial'].nunique()})": [
            median_curve(own.query("arm == @arm"), "micro_batch", column, color=colour, marker=mark, label=label)
            for column, arm, colour, mark, label in CURVES
        ]
        for (model, after), own in rows.groupby(["model", "after_steps"], sort=False)
    }
    gate = (ALGEBRA_GATE, f"gate {power_of_ten(ALGEBRA_GATE)}")
    return curves(panels, "micro-batch b", "‖a - g‖ / ‖g‖, float64", level=gate, ylim=(EXACT / 3, 300), ncols=3)


def figure_effective_momentum(plain: pd.DataFrame, corrected: pd.DataFrame) -> Figure:
    """Effective momentum of the running statistics over N: measured points on the formula's curves; corrected beside it."""
    fine = np.geomspace(plain["accumulation_steps"].min(), plain["accumulation_steps"].max(), 60)
    panels: dict[str, list[Curve]] = {"as it is": [], "momentum 1 - (1 - m)^(1/N)": []}
    for drawn, rows in zip(panels.values(), (plain, corrected), strict=True):
        for colour, m in zip(SERIES, sorted(set(plain["momentum"])), strict=False):
            own = rows.query("momentum == @m")
            formula = 1 - (1 - m) ** fine if rows is plain else np.full_like(fine, m)
            look = {"color": colour, "marker": "o", "linestyle": "", "label": f"m = {m:g} (line: formula)"}
            drawn += [Curve(fine, formula, {"color": colour}), Curve(own["accumulation_steps"], own["effective_momentum"], look)]
    return curves(panels, "accumulation steps N", "forgotten in one window", axes=("steps", "linear"), ylim=(-0.03, 1.03))


def figure_accuracy(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Held-out error in percent over b, mean over seeds with its interval, a line per normalisation; panels: cells by title."""
    drawn = {
        title: [
            mean_curve(own.sort_values("b"), "b", color=colour, marker=mark, label=f"{norm} norm")
            for norm, (colour, mark) in NORMS.items()
            if len(own := cells.query("norm == @norm"))
        ]
        for title, cells in panels.items()
    }
    return curves(drawn, "micro-batch b", "held-out error, %", axes=("steps", "linear"), sharey=False, ylim=(0, None))


def figure_cost_over_values(costs: pd.DataFrame) -> Figure:
    """Points of held-out error above the full batch's over the values per channel, b H W: a line per model and B."""
    groups = costs.sort_values("values").groupby(["model", "effective_batch"])
    drawn = [
        mean_curve(own, "values", color=colour, marker="o", label=f"{NAMES.get(str(model), model)}, B = {batch}")
        for ((model, batch), own), colour in zip(groups, SERIES, strict=False)
    ]
    x = "values per channel in a micro-batch, b H W"
    return curves({"": drawn}, x, "points lost", axes=("steps", "linear"), level=(0, "the full batch's"))
