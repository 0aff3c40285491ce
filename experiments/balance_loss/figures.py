"""Figure of the balance loss of a mixture of experts over N."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import EXACT
from accumulation_harness.analysis.figures.forms import Curve, curves, median_curve
from accumulation_harness.analysis.figures.style import BLUE, GREEN, VERMILLION

LABELS = {
    "per_micro_batch": ("per micro-batch", VERMILLION, "X"),
    "buffered_counts": ("counts buffered within the window", BLUE, "o"),
    "two_passes": ("two passes", GREEN, "D"),
}


def figure_balance(rows: pd.DataFrame) -> Figure:
    """Relative error of the router's gradient over N, at the initial weights, by task: every seed, and the median."""
    panels: dict[str, list[Curve]] = {}
    for (task, arm), own in rows.query("arm in @LABELS").groupby(["workload", "arm"]):
        label, colour, mark = LABELS[str(arm)]
        every = {"color": colour, "marker": mark, "linestyle": "", "alpha": 0.5, "label": label}
        panels.setdefault(str(task), []).extend((
            Curve(own["accumulation_steps"], own["gradient_error"].clip(lower=EXACT), every),
            median_curve(own, "accumulation_steps", "gradient_error", color=colour),
        ))  # fmt: skip
    return curves(panels, "N", "router gradient: relative error", size=(5.6 if len(panels) == 1 else 9.4, 3.2), ncols=3)
