"""Forms that the figures of many questions share: panels beside each other, and points with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import new_figure, style
from accumulation_harness.analysis.tables import optimizers_of
from accumulation_harness.judge import statistics

Rows = TypeVar("Rows")


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


def by_optimizer(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows of each optimizer, in the customary order."""
    return {name: rows.query("optimizer == @name") for name in optimizers_of(rows)}


def mean_line(axes: Axes, places: Sequence[float], samples: Sequence[Sequence[float]], **look: Any) -> None:
    """Means with their 95 % t intervals at these places, leaving out where a sample has no number."""
    found = [(place, one) for place, own in zip(places, samples, strict=True)
             if np.isfinite((one := statistics.mean_interval(own)).estimate)]  # fmt: skip
    reach = np.array([(one.estimate - one.low, one.high - one.estimate) for _, one in found]).reshape(-1, 2).T
    axes.errorbar([place for place, _ in found], [one.estimate for _, one in found], yerr=np.nan_to_num(reach), marker="o",
                  markersize=4, **look)  # fmt: skip


def rate_axis(axes: Axes, rows: pd.DataFrame) -> None:
    """An axis of learning rates, labelled with every one."""
    axes.set_xscale("log", base=2)
    rates = sorted(set(rows["lr"]))
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
