"""Forms that the figures of many questions share: panels beside each other, curves in them with bars or bands, and their axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Literal

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis.figures.style import (
    BLUE,
    DASHED,
    GREEN,
    GREY,
    INK,
    SERIES,
    VERMILLION,
    by_steps,
    log_axis,
    new_figure,
    steps_axis,
    style,
)
from accumulation_harness.analysis.tables import optimizers_of

# Inches, of panels in up to two columns, and of more. A figure is shown as many times as large whatever its width, so that
# letters have one size, and two columns fit on a phone.
WIDTH, WIDE = 5.4, 9.4
LETTER, MARK = 4.4, 34  # points: of a letter of a legend, and of what stands beside its words
EXACT = 1e-17  # where a difference of exactly zero is drawn
MARKS = "osD^vPX*"
COLOURS: dict[Any, str] = {"full": INK, "permuted": GREY, "accumulated": BLUE, "batch": VERMILLION, "group": GREEN}


@dataclass(frozen=True)
class Curve:
    """Points in one look (matplotlib's: color, marker, label); `bars`: from y to both ends; `band`: both ends."""

    x: Any
    y: Any
    look: Mapping[str, Any]
    bars: Any = None
    band: Any = None
    kind: Any = None  # of what, where the figure chooses the look


def mean_curve(cells: DataFrame, x: str, y: str = "mean", **look: Any) -> Curve:
    """The means of cells with their intervals; a single seed has none.

    Args:
        cells: Rows with columns `mean`, `low`, `high`.
        x: Column of the axis.
        y: Column of the values.
        look: Keyword arguments of matplotlib's `plot`.

    Returns:
        The curve.
    """
    cells = cells.sort_values(x)
    return Curve(cells[x], cells[y], look, [(cells[y] - cells["low"]).fillna(0), (cells["high"] - cells[y]).fillna(0)])


def median_curve(rows: DataFrame, x: str, y: str, **look: Any) -> Curve:
    """Medians over trials, and the range; what is exactly zero is drawn at the bottom.

    Args:
        rows: One for each trial.
        x: Column of the axis.
        y: Column of the values.
        look: Keyword arguments of matplotlib's `plot`.

    Returns:
        The curve.
    """
    found = rows.groupby(x)[y].agg(["median", "min", "max"]).clip(lower=EXACT)
    return Curve(found.index, found["median"], look, band=(found["min"], found["max"]))


def band_curve(cells: DataFrame, x: str, y: str = "mean", **look: Any) -> Curve:
    """The means of cells, their intervals as a band.

    Args:
        cells: Rows with columns `mean`, `low`, `high`.
        x: Column of the axis.
        y: Column of the values.
        look: Keyword arguments of matplotlib's `plot`.

    Returns:
        The curve.
    """
    return Curve(cells[x], cells[y], {**look, "marker": ""}, band=(cells["low"], cells["high"]))


def points(rows: DataFrame, x: str, y: str, **look: Any) -> Curve:
    """A mark for every row.

    Args:
        rows: Any rows.
        x: Column of the axis.
        y: Column of the values.
        look: Keyword arguments of matplotlib's `plot`.

    Returns:
        The curve.
    """
    return Curve(rows[x], rows[y].clip(lower=EXACT), {"linestyle": "", "alpha": 0.7, **look})


def lines(
    rows: DataFrame,
    by: str,
    x: str,
    y: str = "mean",
    names: Callable[[Any], object] = str,
    of: Callable[..., Curve] = median_curve,
    **look: Any,
) -> list[Curve]:
    """A curve `of` the rows of each kind (`by`), named by `names`; a kind looks alike in every panel of a figure.

    Args:
        rows: Any rows.
        by: Column of the kinds.
        x: Column of the axis.
        y: Column of the values.
        names: Kind -> label.
        of: Makes a curve of the rows of a kind.
        look: Keyword arguments of matplotlib's `plot`.

    Returns:
        One curve for each kind.
    """
    kinds = rows[by].unique().tolist()
    return [replace(of(rows[rows[by] == kind], x, y, label=names(kind), **look), kind=kind) for kind in kinds]


def looks(kinds: Iterable[Any]) -> dict[Any, dict[str, str]]:
    """Colour and mark of each kind: numbers in shades, arms in the colour that they have everywhere.

    Args:
        kinds: Values of a column.

    Returns:
        Kind -> arguments of matplotlib's `plot`.
    """
    chosen = [*dict.fromkeys(kinds)]
    shades: dict[Any, str] = {**by_steps(chosen)} if all(isinstance(kind, int) for kind in chosen) else {}
    own = shades or {kind: COLOURS[name] for kind in chosen if (name := str(kind).partition("@")[0]) in COLOURS}
    others = cycle([colour for colour in SERIES if colour not in own.values()])
    return {
        kind: {"color": own.get(kind) or next(others), "marker": mark} for kind, mark in zip(chosen, cycle(MARKS), strict=False)
    }


def columns_over(rows: DataFrame, x: str, names: Mapping[str, str], **how: Any) -> list[Curve]:
    """A curve for each of these columns, as `lines` draws it.

    Args:
        rows: Any rows.
        x: Column of the axis.
        names: Column -> label.
        how: Further arguments of `lines`.

    Returns:
        One curve for each column.
    """
    return lines(rows.melt(x, [*names]), "variable", x, "value", names.get, **how)


def formula(rows: DataFrame, by: str, x: str, y: str) -> list[Curve]:
    """What a formula says of each kind, beside the `points` that were measured: a line without a name or marks.

    Args:
        rows: Rows with what the formula gives.
        by: Column of the kinds.
        x: Column of the axis.
        y: Column of the values.

    Returns:
        One curve for each kind.
    """
    return lines(rows, by, x, y, "_{}".format, marker="")


def curves(
    shown: Mapping[str, Sequence[Curve]],
    x: str,
    y: str,
    *,
    axes: tuple[str, str] = ("steps", "log"),
    height: float = 2.9,
    columns: int = 2,
    level: tuple[float, str] | None = None,
    sharey: bool | Literal["row"] = True,
    **limits: Any,
) -> Figure:
    """Draw a panel per title; the legend has every label that was drawn, once.

    Args:
        shown: Title -> the curves of a panel.
        x: The label of every x axis.
        y: The label of the y axes in the first column.
        axes: How x and y are scaled: "linear", "log", or "steps" with a tick for every x that has a mark.
        height: Of a panel, in inches.
        columns: How many panels stand beside each other.
        level: A dashed line in every panel, and its name.
        sharey: Whether panels, or those of a row, have one y axis.
        **limits: Further properties of every panel, as `xlim`.

    Returns:
        The figure.
    """
    columns = min(columns, len(shown))
    rows, width = -(-len(shown) // columns), WIDTH if columns <= 2 else WIDE
    labels: dict[str, Artist] = {}
    chosen = looks([curve.kind for drawn in shown.values() for curve in drawn if curve.kind is not None])
    with style():
        figure = new_figure(width, height * rows)
        grid = figure.subplots(rows, columns, sharey=sharey, squeeze=False)
        for own, (title, drawn) in zip(grid.flat, shown.items(), strict=False):
            own.set(title=title, xlabel=x)
            for name, kind in zip("xy", axes, strict=True):
                if kind == "log":
                    log_axis(own, name, most=8)
            if not drawn:
                own.text(0.5, 0.5, "not run", transform=own.transAxes, ha="center")
            for curve in drawn:
                look: dict[str, Any] = {"markersize": 4.5, "linewidth": 1.2, **chosen.get(curve.kind, {}), **curve.look}
                if curve.band is not None:
                    own.fill_between(curve.x, *curve.band, color=look["color"], alpha=0.15, linewidth=0)
                own.errorbar(curve.x, curve.y, yerr=curve.bars, **look)
            if level:  # after the curves: an axis of one height alone has no extent
                own.axhline(level[0], color=INK, linewidth=1, linestyle=DASHED, label=level[1], zorder=1.5)
            if axes[0] == "steps":
                steps_axis(own, [value for curve in drawn for value in curve.x])
            own.set(**limits)
            for handle, label in zip(*own.get_legend_handles_labels(), strict=True):
                labels.setdefault(label, handle)
        for own in grid.flat[len(shown) :]:
            own.remove()
        for own in grid[:, 0]:
            own.set_ylabel(y)
        if labels:
            beside = max(1, min(len(labels), int(72 * width / (LETTER * max(map(len, labels)) + MARK))))
            figure.legend([*labels.values()], [*labels], loc="outside upper left", ncols=beside, columnspacing=1.4, fontsize=8.5)
            figure.set_size_inches(width, height * rows + 0.18 * -(-len(labels) // beside))
    return figure


def by_optimizer(rows: DataFrame) -> dict[str, DataFrame]:
    """The rows of each optimizer, in the customary order.

    Args:
        rows: Rows with a column `optimizer`.

    Returns:
        Name -> its rows.
    """
    return {name: rows.query("optimizer == @name") for name in optimizers_of(rows)}
