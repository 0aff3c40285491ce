"""Figures of the gradient's noise: its variance over the batch, and the noise scale along a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.forms import Curve, curves
from accumulation_harness.analysis.figures.style import BLUE, GREY, INK, ORANGE, VERMILLION

DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))  # one for each seed
KINDS = {True: ("with replacement", BLUE, "o"), False: ("without", VERMILLION, "s")}


def figure_variance(rows: pd.DataFrame, moments: Sequence[int]) -> Figure:
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


def figure_noise_scale(panels: Mapping[str, Sequence[tuple[pd.DataFrame, pd.DataFrame]]]) -> Figure:
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
