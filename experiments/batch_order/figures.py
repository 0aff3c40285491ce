"""Figure of trainings that change their batch at half the samples."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import BLUE, GREEN, GREY, VERMILLION, new_figure, style

LABELS = {
    "large": ("large throughout", GREY),
    "large_then_small": ("large, then small", VERMILLION),
    "small_then_large": ("small, then large", BLUE),
    "small": ("small throughout", GREEN),
}


def figure_orders(rows: pd.DataFrame) -> Figure:
    """Test loss by order, a panel per setting: a mark per seed, and the mean."""
    groups = list(rows.groupby(["workload", "optimizer", "accumulation_steps"]))
    with style():
        figure = new_figure(WIDTH, 2.6 * ((len(groups) + 1) // 2))
        panels = figure.subplots((len(groups) + 1) // 2, min(2, len(groups)), squeeze=False).flat
        for axes, ((workload, optimizer, num), own) in zip(panels, groups, strict=False):
            for place, (arm, (_, colour)) in enumerate(LABELS.items()):
                losses = own.loc[own["arm"] == arm, "test_loss"].astype(float)
                axes.plot([place] * len(losses), losses, "o", color=colour, markersize=4, alpha=0.6)
                axes.hlines(losses.mean(), place - 0.3, place + 0.3, color=colour)
            axes.set_xticks(range(len(LABELS)), [label.replace(", ", ",\n") for label, _ in LABELS.values()], fontsize=8)
            axes.set(title=f"{workload}, {optimizer}, N = {num}", ylabel="test loss")
    return figure
