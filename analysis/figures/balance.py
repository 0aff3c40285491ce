"""Figure of the balance loss of a mixture of experts over N."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.figures.common import WIDTH
from analysis.figures.style import BLUE, GREEN, VERMILLION, log_axis, new_figure, steps_axis, style

LABELS = {
    "per_micro_batch": ("per micro-batch", VERMILLION, "X"),
    "buffered_counts": ("counts buffered within the window", BLUE, "o"),
    "two_passes": ("two passes", GREEN, "D"),
}
EXACT = 1e-17  # where an error of exactly zero is drawn


def figure_balance(rows: pd.DataFrame) -> Figure:
    """Relative error of the router's gradient over N, at the initial weights: every seed, and the median."""
    with style():
        figure = new_figure(WIDTH * 0.6, 3.0)
        axes = figure.subplots()
        log_axis(axes, "y", most=8)
        steps_axis(axes, sorted(set(rows.loc[rows["accumulation_steps"] > 1, "accumulation_steps"])))
        for arm, (label, colour, mark) in LABELS.items():
            own = rows[rows["arm"] == arm].assign(error=lambda table: table["gradient_error"].clip(lower=EXACT))
            axes.plot(own["accumulation_steps"], own["error"], mark, color=colour, markersize=4, alpha=0.5)
            middle = own.groupby("accumulation_steps")["error"].median()
            axes.plot(middle.index, middle, color=colour, label=label)
        axes.set(xlabel="N", ylabel="router gradient: relative error")
        figure.legend(loc="outside upper left", ncols=3, fontsize=8.5)
    return figure
