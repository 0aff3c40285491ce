"""Figures about the division of the loss: tables in, a matplotlib Figure out."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import BLUE, GREY, VERMILLION, new_figure, steps_axis, style
from accumulation_harness.analysis.tables import optimizers_of
from accumulation_harness.judge.cause import Cause

ARMS = {"accumulated": (BLUE, "o", "divided by N"), Cause.loss_not_divided: (VERMILLION, "X", "undivided")}


def figure_update_size(rows: pd.DataFrame) -> Figure:
    """||theta_1 - theta_0|| over N, relative to N = 1 of the same trial; a panel per optimizer, a line per trial."""
    optimizers = optimizers_of(rows)
    start = rows[(rows["accumulation_steps"] == 1) & (rows["arm"] == "accumulated")].set_index("trial")["first_update"]
    rows = rows.assign(relative=rows["first_update"] / rows["trial"].map(start))
    numbers = sorted(set(rows["accumulation_steps"].astype(int)))  # among other studies the column has gaps
    with style():
        figure = new_figure(WIDTH, 3.0)
        panels = figure.subplots(1, len(optimizers), sharey=True, squeeze=False)[0]
        for axes, optimizer in zip(panels, optimizers, strict=True):
            own = rows[rows["optimizer"] == optimizer]
            axes.plot(numbers, numbers, color=GREY, linestyle=(0, (4, 3)), linewidth=1, label="N times")
            for arm, (colour, mark, label) in ARMS.items():
                for place, (_, line) in enumerate(own[own["arm"] == arm].sort_values("accumulation_steps").groupby("trial")):
                    axes.plot(line["accumulation_steps"], line["relative"], color=colour, marker=mark, markersize=4,
                              alpha=0.8, label=label if place == 0 else None)  # fmt: skip
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set(title=optimizer, xlabel="N, micro-batches of one size")
            steps_axis(axes, numbers)
        panels[0].set_ylabel("first update / that of N = 1")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3)
    return figure
