"""Figure of the balance loss of a mixture of experts over N."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import BLUE, GREEN, VERMILLION, log_axis, new_figure, steps_axis, style

LABELS = {
    "per_micro_batch": ("per micro-batch", VERMILLION, "X"),
    "buffered_counts": ("counts buffered within the window", BLUE, "o"),
    "two_passes": ("two passes", GREEN, "D"),
}
EXACT = 1e-17  # where an error of exactly zero is drawn


def figure_balance(rows: pd.DataFrame) -> Figure:
    """Relative error of the router's gradient over N, at the initial weights, by task: every seed, and the median."""
    tasks = list(rows.groupby("workload"))
    with style():
        figure = new_figure(WIDTH * (0.6 if len(tasks) == 1 else 1), 3.0)
        panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
        for axes, (task, of_task) in zip(panels, tasks, strict=True):
            log_axis(axes, "y", most=8)
            steps_axis(axes, sorted(set(of_task.loc[of_task["accumulation_steps"] > 1, "accumulation_steps"])))
            for arm, (label, colour, mark) in LABELS.items():
                own = of_task[of_task["arm"] == arm].assign(error=lambda table: table["gradient_error"].clip(lower=EXACT))
                axes.plot(own["accumulation_steps"], own["error"], mark, color=colour, markersize=4, alpha=0.5)
                middle = own.groupby("accumulation_steps")["error"].median()
                axes.plot(middle.index, middle, color=colour, label=label if axes is panels[0] else None)
            axes.set(title=task, xlabel="N")
        panels[0].set(ylabel="router gradient: relative error")
        figure.legend(loc="outside upper left", ncols=3, fontsize=8.5)
    return figure
