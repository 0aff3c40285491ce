"""Figures of the faults: who sees them, and which planted errors are found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.forms import Curve, curves
from accumulation_harness.analysis.figures.style import BLUE, GREY, INK, ORANGE, VERMILLION, new_figure, style
from accumulation_harness.analysis.rates import Rate

SHADES = LinearSegmentedColormap.from_list("shares", ["#f1f5f9", "#9ec9e6", BLUE])
HEAD = 100  # points between the cells and the titles, for the slanted names of the columns
KINDS = {"scale": (BLUE, "o"), "direction": (VERMILLION, "s"), "tensor": (ORANGE, "^")}


def figure_matrix(panels: Sequence[tuple[str, pd.DataFrame, pd.DataFrame]]) -> Figure:
    """Panels that share their rows (faults): title, shares as shades (NaN: not run), and what is written into the cells."""
    first = panels[0][1]
    widths = [shares.shape[1] for _, shares, _ in panels]
    with style():
        figure = new_figure(WIDTH, 2.0 + 0.265 * len(first))
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)[0]
        for axes, (title, shares, words) in zip(grid, panels, strict=True):
            values = shares.to_numpy(dtype=float)
            axes.pcolormesh(np.ma.masked_invalid(values), cmap=SHADES, vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
            for (row, column), value in np.ndenumerate(values):
                if np.isfinite(value):
                    ink, text = "white" if value > 0.7 else GREY if value == 0 else INK, words.iat[row, column]
                    axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=7.5)
            axes.set_xticks(np.arange(values.shape[1]) + 0.5, list(map(str, shares.columns)), rotation=55, ha="left")
            axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
            axes.set_frame_on(False)
            axes.grid(visible=False)
            axes.annotate(title, (0, 1), xycoords="axes fraction", xytext=(0, HEAD), textcoords="offset points", fontsize=9.5)
        grid[0].set_yticks(np.arange(len(first)) + 0.5, list(map(str, first.index)))
        grid[0].set_ylim(len(first), 0)
    return figure


def figure_sensitivity(rates: pd.DataFrame, targets: dict[str, float], wanted: float) -> Figure:
    """Share of planted errors that are found over their relative size, a panel per precision, with exact 95 % intervals."""
    precisions = list(dict.fromkeys(rates["precision"]))
    panels: dict[str, list[Curve]] = {}
    for precision in precisions:
        own = rates.query("precision == @precision")
        drawn = panels.setdefault(f"{precision} (n = {own['n'].max()} a point)", [])
        for place, (kind, (colour, mark)) in enumerate(KINDS.items()):
            of_kind = own.query("kind == @kind")
            found = [Rate(k, n) for k, n in zip(of_kind["k"], of_kind["n"], strict=True)]
            bars = [[one.share - one.low for one in found], [one.high - one.share for one in found]]
            look = {"color": colour, "marker": mark, "label": kind}
            drawn.append(Curve(of_kind["size"] * 1.12 ** (place - 1), [one.share for one in found], look, bars))
    figure = curves(panels, "planted relative error", "share that is found", axes=("log", "linear"),
                    level=(wanted, f"{wanted:.0%}"), ncols=5, ylim=(-0.03, 1.03))  # fmt: skip
    for axes, precision in zip(figure.axes, precisions, strict=True):
        if precision in targets:
            axes.axvline(targets[precision], color=GREY, linewidth=0.9, linestyle=":")
            axes.text(targets[precision], 0.5, " target", color=GREY)
    return figure
