"""Figure of trainings that change their batch at half the samples."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.panels import panels
from accumulation_harness.analysis.figures.style import BLUE, GREEN, GREY, VERMILLION

LABELS = {
    "large": ("large throughout", GREY),
    "large_then_small": ("large, then small", VERMILLION),
    "small_then_large": ("small, then large", BLUE),
    "small": ("small throughout", GREEN),
}


def figure_orders(rows: pd.DataFrame) -> Figure:
    """Test loss by order, a panel per setting: a mark per seed, and the mean."""

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        for place, (arm, (_, colour)) in enumerate(LABELS.items()):
            losses = own.loc[own["arm"] == arm, "test_loss"].astype(float)
            axes.plot([place] * len(losses), losses, "o", color=colour, markersize=4, alpha=0.6)
            axes.hlines(losses.mean(), place - 0.3, place + 0.3, color=colour)
        axes.set_xticks(range(len(LABELS)), [label.replace(", ", ",\n") for label, _ in LABELS.values()], fontsize=8)

    groups = {f"{workload}, {optimizer}, N = {num}": own
              for (workload, optimizer, num), own in rows.groupby(["workload", "optimizer", "accumulation_steps"])}  # fmt: skip
    return panels(groups, draw, 2.6, y="test loss", columns=2, share=False)
