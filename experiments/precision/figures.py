"""Figures of number formats: the error of a sum over N by its accumulator, and what 16 bits do to ratios and to accuracy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import (
    BAND,
    BLUE,
    GREEN,
    GREY,
    INK,
    VERMILLION,
    key,
    log_axis,
    new_figure,
    steps_axis,
    style,
)

ACCUMULATORS = {"bfloat16": (VERMILLION, "s"), "float16": (BLUE, "o"), "float32": (GREEN, "^")}


def figure_accumulators(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Relative error of the accumulated gradient over N, a panel per title: points measured, lines from independent roundings."""
    with style():
        figure = new_figure(WIDTH, 3.6)
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
        for axes, (title, rows) in zip(grid[0], panels.items(), strict=True):
            log_axis(axes, "y", most=8)
            for name, (colour, mark) in ACCUMULATORS.items():
                _errors(axes, rows[rows["accumulator"] == name], colour, mark)
            axes.axhline(rows["full_error"].median(), color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            steps_axis(axes, rows["accumulation_steps"].astype(int).tolist())
            axes.set(title=title, xlabel="accumulation steps N")
        grid[0, 0].set_ylabel("relative error of the gradient")
        handles = [Line2D([], [], color=colour, marker=mark, linestyle="", markerfacecolor="none", label=f"sum in {name}")
                   for name, (colour, mark) in ACCUMULATORS.items()]  # fmt: skip
        handles += [
            Line2D([], [], color=GREY, linewidth=1, label="predicted from independent roundings"),
            key("the large batch's own"),
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=5, columnspacing=1.2)
    return figure


def _errors(axes: Axes, rows: pd.DataFrame, colour: str, mark: str) -> None:
    """Every trial a point; the line is the median prediction."""
    predicted = rows.groupby("accumulation_steps")["predicted_error"].median()
    axes.plot(predicted.index, predicted, color=colour, linewidth=1)
    axes.plot(rows["accumulation_steps"], rows["arm_error"], mark, color=colour, markersize=4.5, markerfacecolor="none")


def figure_ratios(panels: Mapping[str, pd.DataFrame], gate: float) -> Figure:
    """Error of the accumulated over the full batch's, the sum in float32, over N; a panel per format of the forward."""
    with style():
        figure = new_figure(WIDTH, 2.7)
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
        for axes, (title, rows) in zip(grid[0], panels.items(), strict=True):
            axes.axhline(1, color=GREY, linewidth=0.8)
            axes.axhline(gate, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            reach = np.clip([rows["ratio"] - rows["low"], rows["high"] - rows["ratio"]], 0, None)
            axes.errorbar(
                rows["accumulation_steps"], rows["ratio"], yerr=reach, fmt="^", color=GREEN, markersize=4, elinewidth=0.8
            )
            steps_axis(axes, rows["accumulation_steps"].astype(int).tolist())
            axes.set(title=f"forward in {title}", xlabel="accumulation steps N")
        grid[0, 0].set(ylabel="error over the large batch's", ylim=(0, None))
        points = Line2D([], [], color=GREEN, marker="^", linestyle="", label="accumulated, 95% interval")
        figure.legend(handles=[points, key(f"gate: {gate:g} times")], loc="outside upper left", ncols=2)
    return figure


def figure_accuracy(cells: pd.DataFrame, margin: float) -> Figure:
    """Mean accuracy differences with 95 % intervals, in points, a row each; shaded: the margin."""
    with style():
        figure = new_figure(WIDTH, 0.9 + 0.3 * len(cells))
        axes = figure.subplots()
        axes.axvspan(-100 * margin, 100 * margin, color=BAND, alpha=0.5, linewidth=0)
        axes.axvline(0, color=GREY, linewidth=0.8)
        places = np.arange(len(cells))[::-1]
        reach = [100 * (cells["mean"] - cells["low"]), 100 * (cells["high"] - cells["mean"])]
        axes.errorbar(100 * cells["mean"], places, xerr=reach, fmt="o", color=BLUE, markersize=4, elinewidth=1)
        axes.set_yticks(places, cells["label"].tolist())
        axes.set(xlabel="held-out accuracy, difference in points", ylim=(-0.7, len(cells) - 0.3))
        shaded = Patch(color=BAND, alpha=0.5, label=f"margin of the equivalence test: {100 * margin:g} point")
        figure.legend(handles=[shaded], loc="outside upper left")
    return figure
