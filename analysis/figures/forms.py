"""Forms that the figures of many questions share: panels beside each other, curves in them with bars or bands, and their axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from accumulation_harness.analysis.figures.style import DASHED, INK, log_axis, new_figure, steps_axis, style
from accumulation_harness.analysis.tables import optimizers_of

Rows = TypeVar("Rows")
WIDTH = 9.4  # inches, of every figure: then letters have one size on the page
EXACT = 1e-17  # where a difference of exactly zero is drawn


def to_the_ends(cells: DataFrame) -> list[Series[float]]:
    """From the mean of each cell to both ends of its interval; 0 where a single seed has none."""
    return [(cells["mean"] - cells["low"]).fillna(0), (cells["high"] - cells["mean"]).fillna(0)]


@dataclass(frozen=True)
class Curve:
    """Points in one look (matplotlib's: color, marker, label); `bars`: from y to both ends; `band`: both ends."""

    x: Any
    y: Any
    look: Mapping[str, Any]
    bars: Any = None
    band: Any = None


def mean_curve(cells: DataFrame, x: str, **look: Any) -> Curve:
    """The means of cells with their intervals."""
    return Curve(cells[x], cells["mean"], look, to_the_ends(cells))


def median_curve(rows: DataFrame, x: str, y: str, **look: Any) -> Curve:
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


def panels(
    rows: Mapping[str, Rows],
    draw: Callable[[Axes, Rows], object],
    height: float,
    *,
    x: str = "",
    y: str = "",
    columns: int = 0,
    share: bool | Literal["row"] = True,
    width: float = WIDTH,
    ncols: int = 3,
) -> Figure:
    """A panel per title, in one line or in `columns`; the legend has every label that was drawn, once."""
    columns = min(columns or len(rows), len(rows))
    lines = -(-len(rows) // columns)
    with style():
        figure = new_figure(width, height * lines)
        grid = figure.subplots(lines, columns, sharey=share, squeeze=False)
        for axes, (title, drawn) in zip(grid.flat, rows.items(), strict=False):
            axes.set(title=title, xlabel=x)
            draw(axes, drawn)
        for own in grid.flat[len(rows) :]:
            own.set_visible(False)
        for own in grid[:, 0]:
            own.set_ylabel(y)
        labels: dict[str, Artist] = {}
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                labels.setdefault(label, handle)
        if labels:
            figure.legend(
                list(labels.values()), list(labels), loc="outside upper left", ncols=ncols, columnspacing=1.4, fontsize=8.5
            )
    return figure


def by_optimizer(rows: DataFrame) -> dict[str, DataFrame]:
    """The rows of each optimizer, in the customary order."""
    return {name: rows.query("optimizer == @name") for name in optimizers_of(rows)}


def rate_axis(axes: Axes, rows: DataFrame) -> None:
    """An axis of learning rates, labelled with every one."""
    axes.set_xscale("log", base=2)
    rates = sorted(set(rows["lr"]))
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
