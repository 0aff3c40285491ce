"""Figures of number formats: the error of a sum over N by its accumulator, and what 16 bits do to ratios and to accuracy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.panels import panels
from accumulation_harness.analysis.figures.style import BAND, BLUE, DASHED, GREEN, GREY, INK, VERMILLION, log_axis, steps_axis

ACCUMULATORS = {"bfloat16": (VERMILLION, "s"), "float16": (BLUE, "o"), "float32": (GREEN, "^")}


def figure_accumulators(rows: Mapping[str, pd.DataFrame]) -> Figure:
    """Relative error of the accumulated gradient over N, a panel per title: points measured, lines from independent roundings."""

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        log_axis(axes, "y", most=8)
        for name, (colour, mark) in ACCUMULATORS.items():
            own = rows.query("accumulator == @name")
            axes.plot(own["accumulation_steps"], own["arm_error"], mark, color=colour, markersize=4.5, markerfacecolor="none",
                      label=f"sum in {name}")  # fmt: skip
            predicted = own.groupby("accumulation_steps")["predicted_error"].median()
            axes.plot(predicted.index, predicted, color=colour, linewidth=1, label="predicted from independent roundings")
        axes.axhline(rows["full_error"].median(), color=INK, linewidth=0.9, linestyle=DASHED, label="the large batch's own")
        steps_axis(axes, rows["accumulation_steps"].astype(int).tolist())

    return panels(rows, draw, 3.6, x="accumulation steps N", y="relative error of the gradient", ncols=5)


def figure_ratios(rows: Mapping[str, pd.DataFrame], gate: float) -> Figure:
    """Error of the accumulated over the full batch's, the sum in float32, over N; a panel per format of the forward."""

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.axhline(gate, color=INK, linewidth=0.9, linestyle=DASHED, label=f"gate: {gate:g} times")
        reach = np.clip([rows["ratio"] - rows["low"], rows["high"] - rows["ratio"]], 0, None)
        axes.errorbar(rows["accumulation_steps"], rows["ratio"], yerr=reach, fmt="^", color=GREEN, markersize=4, elinewidth=0.8,
                      label="accumulated, 95% interval")  # fmt: skip
        steps_axis(axes, rows["accumulation_steps"].astype(int).tolist())
        axes.set_ylim(bottom=0)

    named = {f"forward in {name}": own for name, own in rows.items()}
    return panels(named, draw, 2.7, x="accumulation steps N", y="error over the large batch's")


def figure_accuracy(cells: pd.DataFrame, margin: float) -> Figure:
    """Mean accuracy differences with 95 % intervals, in points, a row each; shaded: the margin."""

    def draw(axes: Axes, cells: pd.DataFrame) -> None:
        label = f"margin of the equivalence test: {100 * margin:g} point"
        axes.axvspan(-100 * margin, 100 * margin, color=BAND, alpha=0.5, linewidth=0, label=label)
        axes.axvline(0, color=GREY, linewidth=0.8)
        reach = [100 * (cells["mean"] - cells["low"]), 100 * (cells["high"] - cells["mean"])]
        axes.errorbar(100 * cells["mean"], range(len(cells)), xerr=reach, fmt="o", color=BLUE, markersize=4, elinewidth=1)
        axes.set_yticks(range(len(cells)), cells["label"].tolist())
        axes.invert_yaxis()

    return panels({"": cells}, draw, 0.9 + 0.3 * len(cells), x="held-out accuracy, difference in points")
