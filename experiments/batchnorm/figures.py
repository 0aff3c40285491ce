"""Figures of BatchNorm: what its statistics do to gradient and buffers over b, and what accuracy over b says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from accumulation_harness.analysis.figures.common import WIDTH, to_the_ends
from accumulation_harness.analysis.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SERIES,
    VERMILLION,
    log_axis,
    new_figure,
    power_of_ten,
    steps_axis,
    style,
)
from accumulation_harness.judge.gates import ALGEBRA_GATE

NAMES = {"mlp": "perceptron", "conv": "convolutions"}  # models as the page calls them
FLOOR = 1e-17  # where an exact zero is drawn
CURVES = (
    ("gradient_error", "accumulated", VERMILLION, "X", "accumulated"),
    ("bias", "accumulated", ORANGE, "^", "of it: common to all cuts (bias)"),
    ("oracle_error", "accumulated", GREEN, "D", "accumulated, against Ghost BatchNorm"),
    ("gradient_error", "two_pass_statistics", BLUE, "o", "two-pass statistics"),
)


def figure_gradient_over_b(rows: pd.DataFrame) -> Figure:
    """Relative gradient error over b, a panel for each model and moment; medians and ranges over trials."""
    panels = list(dict.fromkeys(zip(rows["model"], rows["after_steps"], strict=True)))
    sizes = sorted(set(rows["micro_batch"]))
    with style():
        figure = new_figure(WIDTH, 3.5)
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
        for axes, (model, after) in zip(grid[0], panels, strict=True):
            own = rows[(rows["model"] == model) & (rows["after_steps"] == after)]
            log_axis(axes, "y", most=10)
            steps_axis(axes, sizes)
            axes.axhline(ALGEBRA_GATE, color=INK, linewidth=1, linestyle=(0, (4, 3)))
            for column, arm, colour, mark, _ in CURVES:
                _range(axes, own[own["arm"] == arm], column, colour, mark)
            moment = "initial weights" if after == 0 else f"after {int(after)} steps"
            axes.set_title(f"{NAMES.get(model, model)}\n{moment} (n = {own['trial'].nunique()})")
            axes.set(xlabel="micro-batch b", ylim=(FLOOR / 3, 300))
        grid[0, 0].set_ylabel("‖a - g‖ / ‖g‖, float64")
        grid[0, 0].text(sizes[0], ALGEBRA_GATE * 3, f"gate {power_of_ten(ALGEBRA_GATE)}", fontsize=8.5)
        handles = [Line2D([], [], marker=mark, color=colour, label=label) for _, _, colour, mark, label in CURVES]
        figure.legend(handles=handles, loc="outside upper left", ncols=4, columnspacing=1.2, fontsize=8.5)
    return figure


def _range(axes: Axes, rows: pd.DataFrame, column: str, colour: str, mark: str) -> None:
    spread = rows.groupby("micro_batch")[column].agg(["median", "min", "max"]).clip(lower=FLOOR)
    axes.fill_between(spread.index, spread["min"], spread["max"], color=colour, alpha=0.15, linewidth=0)
    axes.plot(spread.index, spread["median"], color=colour, marker=mark, markersize=4.5)


def figure_effective_momentum(plain: pd.DataFrame, corrected: pd.DataFrame) -> Figure:
    """Effective momentum of the running statistics over N: measured points on the formula's curves; corrected beside it."""
    momenta = sorted(set(plain["momentum"]))
    steps = sorted(set(plain["accumulation_steps"]))
    fine = np.geomspace(min(steps), max(steps), 60)
    with style():
        figure = new_figure(WIDTH, 3.2)
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, rows, title in ((left, plain, "as it is"), (right, corrected, "momentum 1 - (1 - m)^(1/N)")):
            steps_axis(axes, steps)
            for colour, m in zip(SERIES, momenta, strict=False):
                formula = 1 - (1 - m) ** fine if rows is plain else np.full_like(fine, m)
                axes.plot(fine, formula, color=colour, linewidth=1)
                own = rows[rows["momentum"] == m]
                axes.plot(
                    own["accumulation_steps"], own["effective_momentum"], "o", color=colour, markersize=4, label=f"m = {m:g}"
                )
            axes.set(title=title, xlabel="accumulation steps N", ylim=(-0.03, 1.03))
        left.set_ylabel("forgotten in one window")
        handles, labels = left.get_legend_handles_labels()
        handles.append(Line2D([], [], color=GREY, linewidth=1))
        figure.legend(handles, [*labels, "formula"], loc="outside upper left", ncols=len(labels) + 1)
    return figure


def figure_accuracy(panels: Sequence[tuple[str, pd.DataFrame]]) -> Figure:
    """Held-out error in percent over b, mean over seeds with its interval, a line per normalisation; panels: (title, cells)."""
    looks = {"batch": (VERMILLION, "X"), "group": (BLUE, "o"), "layer": (GREEN, "D")}
    with style():
        figure = new_figure(WIDTH, 3.3)
        grid = figure.subplots(1, len(panels), squeeze=False)
        for axes, (title, shown) in zip(grid[0], panels, strict=True):
            steps_axis(axes, shown["b"].tolist())
            for norm, (colour, mark) in looks.items():
                own = shown[shown["norm"] == norm].sort_values("b")
                if len(own):
                    reach = to_the_ends(own)
                    axes.errorbar(own["b"], own["mean"], yerr=reach, color=colour, marker=mark, markersize=4.5, linewidth=1.2)
            axes.set(title=title, xlabel="micro-batch b")
            axes.set_ylim(bottom=0)
        grid[0, 0].set_ylabel("held-out error, %")
        present = [norm for norm in looks if any((cells["norm"] == norm).any() for _, cells in panels)]
        handles = [Line2D([], [], color=looks[norm][0], marker=looks[norm][1], label=f"{norm} norm") for norm in present]
        figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


def figure_cost_over_values(costs: pd.DataFrame) -> Figure:
    """Points of held-out error above the full batch's over the values per channel, b H W: a line per model and B."""
    with style():
        figure = new_figure(WIDTH, 3.0)
        axes = figure.subplots()
        steps_axis(axes, [int(value) for value in costs["values"]])
        axes.axhline(0, color=INK, linewidth=1)
        lines = costs.sort_values("values").groupby(["model", "effective_batch"])
        for ((model, batch), own), colour in zip(lines, SERIES, strict=False):
            reach = to_the_ends(own)
            label = f"{NAMES.get(str(model), str(model))}, B = {batch}"
            axes.errorbar(
                own["values"], own["mean"], yerr=reach, color=colour, marker="o", markersize=4.5, linewidth=1.2, label=label
            )
        axes.set(xlabel="values per channel in a micro-batch, b H W", ylabel="points lost")
        figure.legend(loc="outside upper left", ncols=3)
    return figure
