"""Figure of Muon's update under accumulation: its error over that of the gradient."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.forms import Curve, curves
from accumulation_harness.analysis.figures.style import BLUE, GREEN, GREY, VERMILLION

LABELS = {
    "permuted": ("full batch, rows permuted (null)", GREY, "s"),
    "accumulated": ("accumulated", BLUE, "o"),
    "bfloat16_sum": ("accumulated in bfloat16", GREEN, "D"),
    "per_micro_batch": ("orthogonalised per micro-batch", VERMILLION, "X"),
}


def figure_muon(rows: pd.DataFrame) -> Figure:
    """Relative error of the update over that of the gradient, both root mean squares over windows; a mark per trial and N."""
    drawn = [
        Curve(own["gradient_error"], own["update_error"],
              {"color": colour, "marker": mark, "linestyle": "", "alpha": 0.6, "label": label})
        for arm, (label, colour, mark) in LABELS.items()
        for own in [rows.query("arm == @arm and update_error > 0 and gradient_error > 0")]
    ]  # fmt: skip
    x, y = "gradient: relative error", "Muon's update: relative error"
    return curves({"": drawn}, x, y, axes=("log", "log"), size=(5.6, 3.2), ncols=2)
