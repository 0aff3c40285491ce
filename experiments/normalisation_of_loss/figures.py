"""Figures about the division of the loss: tables in, a matplotlib Figure out."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.panels import by_optimizer, panels
from accumulation_harness.analysis.figures.style import BLUE, DASHED, GREY, VERMILLION, steps_axis
from accumulation_harness.judge.cause import Cause

ARMS = {"accumulated": (BLUE, "o", "divided by N"), Cause.loss_not_divided: (VERMILLION, "X", "undivided")}


def figure_update_size(rows: pd.DataFrame) -> Figure:
    """||theta_1 - theta_0|| over N, relative to N = 1 of the same trial; a panel per optimizer, a line per trial."""
    start = rows.query("accumulation_steps == 1 and arm == 'accumulated'").set_index("trial")["first_update"]
    rows = rows.assign(relative=rows["first_update"] / rows["trial"].map(start)).sort_values("accumulation_steps")
    numbers = sorted(set(rows["accumulation_steps"].astype(int)))  # among other studies the column has gaps

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        axes.plot(numbers, numbers, color=GREY, linestyle=DASHED, linewidth=1, label="N times")
        for arm, (colour, mark, label) in ARMS.items():
            for _, line in rows[rows["arm"] == arm].groupby("trial"):
                axes.plot(line["accumulation_steps"], line["relative"], color=colour, marker=mark, markersize=4, alpha=0.8,
                          label=label)  # fmt: skip
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        steps_axis(axes, numbers)

    return panels(by_optimizer(rows), draw, 3.0, x="N, micro-batches of one size", y="first update / that of N = 1")
