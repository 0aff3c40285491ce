"""Figure of Muon's update under accumulation: its error over that of the gradient."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import BLUE, GREEN, GREY, VERMILLION, log_axis, new_figure, style

LABELS = {
    "permuted": ("full batch, rows permuted (null)", GREY, "s"),
    "accumulated": ("accumulated", BLUE, "o"),
    "bfloat16_sum": ("accumulated in bfloat16", GREEN, "D"),
    "per_micro_batch": ("orthogonalised per micro-batch", VERMILLION, "X"),
}


def figure_muon(rows: pd.DataFrame) -> Figure:
    """Relative error of the update over that of the gradient, both root mean squares over windows; a mark per trial and N."""
    with style():
        figure = new_figure(WIDTH * 0.6, 3.0)
        axes = figure.subplots()
        log_axis(axes, "x", most=8)
        log_axis(axes, "y", most=8)
        for arm, (label, colour, mark) in LABELS.items():
            own = rows[(rows["arm"] == arm) & (rows["update_error"] > 0) & (rows["gradient_error"] > 0)]
            axes.plot(own["gradient_error"], own["update_error"], mark, color=colour, markersize=4, alpha=0.6, label=label)
        axes.set(xlabel="gradient: relative error", ylabel="Muon's update: relative error")
        figure.legend(loc="outside upper left", ncols=2, fontsize=8.5)
    return figure
