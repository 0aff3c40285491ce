"""Figures about the order of operations and about changing windows: tables in, a matplotlib Figure out."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accumulation_harness.analysis.faults import VISIBLE
from accumulation_harness.analysis.figures.panels import by_optimizer, panels
from accumulation_harness.analysis.figures.style import DASHED, INK, SERIES, VERMILLION, log_axis, power_of_ten, steps_axis
from accumulation_harness.analysis.tables import NORMS
from accumulation_harness.judge.gates import ALGEBRA_GATE

EXACT = 1e-17  # where a difference of exactly zero is drawn
BOTTOM = 1e-4  # relative: below, a curve lies on the correct one


def figure_losses(steps: pd.DataFrame) -> Figure:
    """|loss / correct loss - 1| over the optimizer steps: a panel per optimizer, a line per wrong arm."""
    wrong = sorted(set(steps["arm"]) - {"accumulated", "full", "permuted"})

    def draw(axes: Axes, rows: pd.DataFrame) -> None:
        curves = rows.pivot_table(index="step", columns="arm", values="loss")
        for place, arm in enumerate(wrong):
            if arm in curves:
                apart = (curves[arm] / curves["accumulated"] - 1).abs().clip(lower=BOTTOM)
                dash = "--" if place // len(SERIES) % 2 else "-"
                axes.plot(curves.index, apart, dash, color=SERIES[place % len(SERIES)], linewidth=1.1, label=arm)
        label = f"visible in the loss ({VISIBLE:.0%} of it)"
        axes.axhline(VISIBLE, color=INK, linewidth=1, linestyle=DASHED, label=label)
        log_axis(axes, "y")

    y = "|loss / correct loss - 1|"
    return panels(by_optimizer(steps), draw, 4.2, x="optimizer step", y=y)


def figure_tensor_norms(table: pd.DataFrame) -> Figure:
    """Largest deviation of a tensor's norm over N: a dot per window, coloured by normalisation."""
    norms = [norm for norm in NORMS if norm in set(table["norm"])]

    def draw(axes: Axes, table: pd.DataFrame) -> None:
        log_axis(axes, "y", most=9)
        for place, norm in enumerate(norms):
            own = table.query("norm == @norm")
            shifted = own["accumulation_steps"] * 1.1 ** (place - (len(norms) - 1) / 2)
            colour, mark = (VERMILLION, "X") if norm == "batch" else (SERIES[place], "o")
            axes.plot(shifted, np.maximum(own["off"], EXACT), mark, color=colour, markersize=4, alpha=0.7, label=f"norm {norm}")
        axes.axhline(ALGEBRA_GATE, color=INK, linewidth=1, linestyle=DASHED, label=f"gate {power_of_ten(ALGEBRA_GATE)}")
        steps_axis(axes, table["accumulation_steps"].astype(int).tolist())  # among other studies the column has gaps

    return panels({"": table}, draw, 3.2, x="N", y="largest |norm / full batch's - 1|", ncols=len(norms) + 1)
