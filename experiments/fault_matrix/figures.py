"""Figures of the faults: who sees them, and which planted errors are found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import BLUE, GREY, INK, ORANGE, VERMILLION, log_axis, new_figure, style
from accumulation_harness.analysis.rates import Rate

SHADES = LinearSegmentedColormap.from_list("shares", ["#f1f5f9", "#9ec9e6", BLUE])
HEAD = 100  # points between the cells and the titles, for the slanted names of the columns
KINDS = {"scale": (BLUE, "o"), "direction": (VERMILLION, "s"), "tensor": (ORANGE, "^")}


def figure_matrix(panels: Sequence[tuple[str, pd.DataFrame, pd.DataFrame]]) -> Figure:
    """Panels that share their rows (faults): title, shares as shades (NaN: not run), and what is written into the cells."""
    first = panels[0][1]
    with style():
        figure = new_figure(WIDTH, 2.0 + 0.265 * len(first))
        grid = figure.subplots(
            1, len(panels), sharey=True, squeeze=False, width_ratios=[shares.shape[1] for _, shares, _ in panels]
        )
        for axes, (title, shares, words) in zip(grid[0], panels, strict=True):
            _cells(axes, shares, words)
            axes.annotate(title, (0, 1), xycoords="axes fraction", xytext=(0, HEAD), textcoords="offset points", fontsize=9.5)
        grid[0, 0].set_yticks(np.arange(len(first)) + 0.5, [str(name) for name in first.index])
        grid[0, 0].set_ylim(len(first), 0)
    return figure


def _cells(axes: Axes, shares: pd.DataFrame, words: pd.DataFrame) -> None:
    values = shares.to_numpy(dtype=float)
    axes.pcolormesh(np.ma.masked_invalid(values), cmap=SHADES, vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            ink = "white" if value > 0.7 else GREY if value == 0 else INK
            axes.text(column + 0.5, row + 0.5, str(words.iat[row, column]), ha="center", va="center", color=ink, fontsize=7.5)
    axes.set_xticks(np.arange(values.shape[1]) + 0.5, [str(name) for name in shares.columns], rotation=55, ha="left")
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.grid(visible=False)
    for side in axes.spines.values():
        side.set_visible(False)


def figure_sensitivity(rates: pd.DataFrame, targets: dict[str, float], wanted: float) -> Figure:
    """Share of planted errors that are found over their relative size, a panel per precision, with exact 95 % intervals."""
    precisions = list(dict.fromkeys(rates["precision"]))
    with style():
        figure = new_figure(WIDTH, 3.1)
        grid = figure.subplots(1, len(precisions), sharey=True, squeeze=False)
        for axes, precision in zip(grid[0], precisions, strict=True):
            own = rates[rates["precision"] == precision]
            log_axis(axes, "x", most=7)
            axes.axhline(wanted, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            if precision in targets:
                axes.axvline(targets[precision], color=GREY, linewidth=0.9, linestyle=(0, (1, 1.5)))
            for place, (kind, (colour, mark)) in enumerate(KINDS.items()):
                _rates(axes, own[own["kind"] == kind], 1.12 ** (place - 1), colour, mark)
            axes.set(title=f"{precision} (n = {own['n'].max()} a point)", xlabel="planted relative error", ylim=(-0.03, 1.03))
        grid[0, 0].set_ylabel("share that is found")
        handles = [Line2D([], [], color=colour, marker=mark, label=kind) for kind, (colour, mark) in KINDS.items()]
        handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), label=f"{wanted:.0%}"))
        handles.append(Line2D([], [], color=GREY, linestyle=(0, (1, 1.5)), label="target"))
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), columnspacing=1.4)
    return figure


def _rates(axes: Axes, rows: pd.DataFrame, shift: float, colour: str, mark: str) -> None:
    rates = [Rate(k, n) for k, n in zip(rows["k"], rows["n"], strict=True)]
    shares = np.array([one.share for one in rates])
    reach = np.array([[one.share - one.low for one in rates], [one.high - one.share for one in rates]])
    axes.errorbar(rows["size"] * shift, shares, yerr=reach, color=colour, marker=mark, markersize=4, linewidth=1, elinewidth=0.7)
