"""Figures of learning curves: mean and band over the seeds that judge, every arm at its tuned rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from accumulation_harness.analysis.answering import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    VERMILLION,
    WIDTH,
    Curve,
    curves,
    panels,
    rate_axis,
    statistics,
)
from accumulation_harness.experiments.convergence.trainings import ARM, NAMES, arm_name

COLOURS = {"full": INK, "accumulated": BLUE, "permuted": GREY, "small_batch": ORANGE, "small_batch_memory": VERMILLION}
LINES = {"accumulated": "--", "permuted": ":"}
TITLES = {"samples": "samples", "optimizer steps": "optimizer_steps", "seconds inside the steps": "seconds"}


def figure_curves(rows: pd.DataFrame, targets: Sequence[float]) -> Figure:
    """Probe loss of one setting over samples, optimizer steps and seconds: a line per arm, its band, and the three targets."""

    def draw(axes: Axes, cost: str) -> None:
        for (arm, num), own in rows.groupby(list(ARM)):
            logs = np.log(np.array(own["curve_probe_loss"].tolist(), dtype=float))
            at = np.array(own[f"curve_{cost}"].tolist(), dtype=float).mean(0)
            ends = [statistics.mean_interval(list(column)) for column in logs.T]
            mean, low, high = np.exp([(one.estimate, one.low, one.high) for one in ends]).T
            colour = COLOURS.get(str(arm), GREEN)
            axes.plot(at, mean, LINES.get(str(arm), "-"), color=colour, label=arm_name(arm, num))
            axes.fill_between(at, low, high, color=colour, alpha=0.13, linewidth=0)
        for target in targets:
            axes.axhline(target, color=GREEN, linewidth=0.7, linestyle=(0, (2, 3)))
        axes.set_yscale("log")
        if cost != "samples":
            axes.set_xscale("log", nonpositive="mask")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())

    return panels(TITLES, draw, 3.4, y="loss on the probe set, nats")


def figure_tuning(rows: pd.DataFrame, chosen: Mapping[tuple[Any, Any], float]) -> Figure:
    """Validation loss over the learning rate on the tuning seeds, a line per arm; the tuned rate is marked."""
    drawn = []
    for (arm, num), own in rows.groupby(list(ARM)):
        means = own.groupby("lr")["validation_loss"].mean().replace(np.inf, np.nan).dropna()
        if (best := chosen.get((arm, num))) is not None:
            look, marked = {"color": COLOURS.get(str(arm), GREEN), "marker": "o"}, means[means.index == best]
            drawn += [
                Curve(means.index, means, {**look, "markersize": 3.5, "label": NAMES.get(str(arm), arm)}),
                Curve(marked.index, marked, {**look, "linestyle": "", "markersize": 9, "fillstyle": "none"}),
            ]
    size, x, y = (WIDTH * 0.6, 3), "learning rate of the trial", "validation loss, nats"
    figure = curves({"": drawn}, x, y, axes=("linear", "linear"), size=size, ncols=3)
    rate_axis(figure.axes[0], rows)
    return figure
