"""Figures of what accumulating saves in memory and costs in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.forms import Curve, curves
from accumulation_harness.analysis.figures.style import BLUE, INK, ORANGE

COLOURS = {"sgd": BLUE, "adam": ORANGE}
MB = 1e6


def figure_cost_of_memory(panels: Mapping[str, pd.DataFrame]) -> Figure:
    """Time of a window over the full batch's against its memory; a point per b, a line per optimizer, a panel per model.

    Columns: optimizer, micro_batch, total_bytes, static_bytes, slowdown. A budget is a place on the x axis: the first point to
    its left is the largest b measured that fits, and its height is what that costs.
    """
    drawn = {
        title: [
            Curve(own["total_bytes"] / MB, own["slowdown"], {"color": COLOURS.get(str(name), INK), "marker": "o", "label": name})
            for name, own in rows.sort_values("micro_batch").groupby("optimizer")
        ]
        for title, rows in panels.items()
    }
    x, y = "memory of a step, MB (dotted: its static part)", "time of a window over the full batch's"
    limits: dict[str, Any] = {"level": (1, "the full batch's"), "xlim": (0, None), "ylim": (0, None)}
    figure = curves(drawn, x, y, axes=("linear", "linear"), sharey=False, **limits)
    for axes, rows in zip(figure.axes, panels.values(), strict=True):
        for row in rows.to_dict("records"):
            axes.axvline(row["static_bytes"] / MB, color=COLOURS.get(row["optimizer"], INK), linewidth=1, linestyle=":")
            place = (row["total_bytes"] / MB, row["slowdown"])
            axes.annotate(f"{row['micro_batch']:.0f}", place, xytext=(4, 4), textcoords="offset points", fontsize=7)
    return figure
