"""Figures of what accumulating saves in memory and costs in time."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import BLUE, GREY, INK, ORANGE, new_figure, style

COLOURS = {"sgd": BLUE, "adam": ORANGE}
MB = 1e6


def figure_cost_of_memory(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Time of a window over the full batch's against its memory; a point per b, a line per optimizer, a panel per model.

    Columns: optimizer, micro_batch, total_bytes, static_bytes, slowdown. A budget is a place on the x axis: the first point to
    its left is the largest b measured that fits, and its height is what that costs.
    """
    with style():
        figure = new_figure(WIDTH, 3.2)
        grid = figure.subplots(1, len(panels), squeeze=False)
        shown: dict[str, str] = {}
        for axes, (title, rows) in zip(grid[0], panels.items(), strict=True):
            axes.axhline(1, color=GREY, linewidth=0.8)
            for optimizer, own in rows.groupby("optimizer"):
                shown[str(optimizer)] = COLOURS.get(str(optimizer), INK)
                _cost(axes, own.sort_values("micro_batch"), shown[str(optimizer)])
            axes.set(title=title, xlabel="memory of a step, MB", ylim=(0, None), xlim=(0, 1.12 * rows["total_bytes"].max() / MB))
        grid[0, 0].set_ylabel("time of a window over the full batch's")
        handles = [Line2D([], [], color=colour, marker="o", markersize=3.5, label=name) for name, colour in shown.items()]
        handles.append(Line2D([], [], color=INK, linestyle=(0, (1, 2)), linewidth=1, label="static part: no b fits below"))
        handles.append(Line2D([], [], color="none", label="number at a point: its micro-batch b"))
        figure.legend(handles=handles, loc="outside upper left", ncols=4, columnspacing=1.4)
    return figure


def _cost(axes: Axes, rows: pd.DataFrame, colour: str) -> None:
    axes.axvline(rows["static_bytes"].iloc[0] / MB, color=colour, linewidth=1, linestyle=(0, (1, 2)))
    axes.plot(rows["total_bytes"] / MB, rows["slowdown"], "o-", color=colour, markersize=3.5)
    for row in rows.to_dict("records"):
        place = (row["total_bytes"] / MB, row["slowdown"])
        axes.annotate(f"{row['micro_batch']:.0f}", place, xytext=(4, 4), textcoords="offset points", fontsize=7, color=INK)
