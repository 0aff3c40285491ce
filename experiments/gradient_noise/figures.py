"""Figures of the gradient's noise: its variance over the batch, and the noise scale along a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import BLUE, GREY, INK, ORANGE, VERMILLION, log_axis, new_figure, style

DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))  # one for each seed
KINDS = {True: ("with replacement", BLUE, "o"), False: ("without", VERMILLION, "s")}


def figure_variance(rows: pd.DataFrame, moments: Sequence[int]) -> Figure:
    """The trace of the batch gradient's covariance over B, a panel per moment: points are measured, lines are formulas."""
    with style():
        figure = new_figure(WIDTH, 3.1)
        grid = figure.subplots(1, len(moments), sharey=True, squeeze=False)
        for axes, step in zip(grid[0], moments, strict=True):
            own = rows[rows["step"] == step]
            log_axis(axes, "y")
            axes.set_xscale("log", base=4)
            for replacement, (_, colour, mark) in KINDS.items():
                points = own[own["replacement"] == replacement].sort_values("batch")
                axes.plot(points["batch"], points["expected"], color=colour, linewidth=1)
                axes.plot(points["batch"], points["variance"], mark, color=colour, markersize=5, markerfacecolor="none")
            sizes = sorted(set(own["batch"].astype(int)))
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set(title=f"step {step}", xlabel="batch B")
        grid[0, 0].set_ylabel("variance of the gradient")
        handles = [
            Line2D([], [], color=colour, marker=mark, markerfacecolor="none", label=name) for name, colour, mark in KINDS.values()
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return figure


def figure_noise_scale(panels: Mapping[str, Sequence[tuple[pd.DataFrame, pd.DataFrame]]]) -> Figure:
    """B_simple over the training, a panel per title; for every seed the exact values (lines) and the stretches' (bars)."""
    with style():
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure = new_figure(WIDTH, 0.6 + 2.6 * rows)
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, seeds) in zip(grid.flat, panels.items(), strict=False):
            log_axis(axes, "y")
            for place, (exact, estimated) in enumerate(seeds):
                scale = exact["noise_trace"] / exact["gradient_square"]
                axes.plot(exact["step"], scale, color=INK, linewidth=0.9, alpha=0.8, linestyle=DASHES[place % len(DASHES)])
                _bars(axes, estimated)
            axes.set(title=title, xlabel="optimizer step")
        for axes in grid[:, 0]:
            axes.set_ylabel("noise scale, samples")
        lowest, highest = grid[0, 0].get_ylim()
        grid[0, 0].set_ylim(max(lowest, 1.0), min(highest, 1e5))
        handles = [Line2D([], [], color=INK, label="from every sample's gradient"),
                   Line2D([], [], color=ORANGE, marker="o", label="from the micro-batches alone, 95%"),
                   Line2D([], [], color=GREY, marker="^", linestyle="", label="the same, without an upper end")]  # fmt: skip
        figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


def _bars(axes: Axes, estimated: pd.DataFrame) -> None:
    """Estimates with their intervals; an interval without an upper end is a grey triangle."""
    shown = estimated[estimated["estimate"] > 0]
    open_end = ~np.isfinite(shown["high"])
    closed = shown[~open_end]
    below, above = closed["estimate"] - closed["low"].clip(lower=1.0), closed["high"] - closed["estimate"]
    reach = np.clip([below, above], 0, None)
    axes.errorbar(closed["step"], closed["estimate"], yerr=reach, fmt="o", color=ORANGE, markersize=3.5, elinewidth=0.8)
    axes.plot(shown["step"][open_end], shown["estimate"][open_end], "^", color=GREY, markersize=3.5)
