"""The general figure of the questions: panels of curves, with bars or bands, and one legend of all that has a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import EXACT, WIDTH, to_the_ends
from accumulation_harness.analysis.figures.style import DASHED, INK, log_axis, new_figure, steps_axis, style


@dataclass(frozen=True)
class Curve:
    """Points in one look (matplotlib's: color, marker, label); `bars`: from y to both ends; `band`: both ends."""

    x: Any
    y: Any
    look: Mapping[str, Any]
    bars: Any = None
    band: Any = None


def mean_curve(cells: pd.DataFrame, x: str, **look: Any) -> Curve:
    """The means of cells with their intervals."""
    return Curve(cells[x], cells["mean"], look, to_the_ends(cells))


def median_curve(rows: pd.DataFrame, x: str, y: str, **look: Any) -> Curve:
    """Medians over trials, and the range; what is exactly zero is drawn at the bottom."""
    found = rows.groupby(x)[y].agg(["median", "min", "max"]).clip(lower=EXACT)
    return Curve(found.index, found["median"], look, band=(found["min"], found["max"]))


def curves(
    panels: Mapping[str, Sequence[Curve]],
    x: str,
    y: str,
    *,
    axes: tuple[str, str] = ("steps", "log"),
    size: tuple[float, float] = (WIDTH, 3.2),
    columns: int = 6,
    level: tuple[float, str] | None = None,
    sharey: bool | Literal["row"] = True,
    ncols: int = 4,
    **limits: Any,
) -> Figure:
    """A panel per title. Axes are linear, log, or steps, a tick for every x with a mark. `level`: a dashed line and its name."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    with style():
        figure = new_figure(size[0], 0.6 + (size[1] - 0.6) * rows)
        grid = figure.subplots(rows, columns, sharey=sharey, squeeze=False)
        for own in grid.flat[len(panels) :]:
            own.set_visible(False)
        for own, (title, drawn) in zip(grid.flat, panels.items(), strict=False):
            for name, kind in zip("xy", axes, strict=True):
                if kind == "log":
                    log_axis(own, name, most=8)
            if level:
                own.axhline(level[0], color=INK, linewidth=1, linestyle=DASHED, label=level[1])
            if not drawn:
                own.text(0.5, 0.5, "not run", transform=own.transAxes, ha="center")
            for curve in drawn:
                look = {"markersize": 4.5, "linewidth": 1.2, **curve.look}
                if curve.band is not None:
                    own.fill_between(curve.x, *curve.band, color=look["color"], alpha=0.15, linewidth=0)
                own.errorbar(curve.x, curve.y, yerr=curve.bars, **look)
            if axes[0] == "steps":
                steps_axis(own, [int(value) for curve in drawn if "marker" in curve.look for value in curve.x])
            own.set(title=title, xlabel=x, **limits)
        for own in grid[:, 0]:
            own.set_ylabel(y)
        named: dict[str, Any] = {}
        for own in grid.flat:
            handles, labels = own.get_legend_handles_labels()
            named |= dict(zip(labels, handles, strict=True))
        figure.legend(list(named.values()), list(named), loc="outside upper left", ncols=ncols, columnspacing=1.4, fontsize=8.5)
    return figure
