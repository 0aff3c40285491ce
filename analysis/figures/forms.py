"""The general figure of the questions: panels of curves, with bars or bands, and one legend of all that has a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import EXACT, WIDTH, to_the_ends
from accumulation_harness.analysis.figures.panels import panels
from accumulation_harness.analysis.figures.style import DASHED, INK, log_axis, steps_axis


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
    shown: Mapping[str, Sequence[Curve]],
    x: str,
    y: str,
    *,
    axes: tuple[str, str] = ("steps", "log"),
    size: tuple[float, float] = (WIDTH, 3.2),
    columns: int = 0,
    level: tuple[float, str] | None = None,
    sharey: bool | Literal["row"] = True,
    ncols: int = 4,
    **limits: Any,
) -> Figure:
    """A panel per title. Axes are linear, log, or steps, a tick for every x with a mark. `level`: a dashed line and its name."""

    def draw(own: Axes, drawn: Sequence[Curve]) -> None:
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
        own.set(**limits)

    return panels(shown, draw, size[1], x=x, y=y, columns=columns, share=sharey, width=size[0], ncols=ncols)
