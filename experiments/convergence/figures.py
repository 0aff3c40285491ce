"""Figures of learning curves: mean and band over the seeds that judge, every arm at its tuned rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import BLUE, GREEN, GREY, INK, ORANGE, VERMILLION, new_figure, style
from accumulation_harness.experiments.convergence.trainings import NAMES
from accumulation_harness.judge import statistics

COLOURS = {"full": INK, "accumulated": BLUE, "permuted": GREY, "small_batch": ORANGE, "small_batch_memory": VERMILLION}
LINES = {"full": "-", "accumulated": (0, (5, 2)), "permuted": (0, (1, 1.5)), "small_batch": "-", "small_batch_memory": "-"}
TITLES = {"samples": "samples", "optimizer_steps": "optimizer steps", "seconds": "seconds inside the steps"}


def figure_curves(rows: pd.DataFrame, targets: Sequence[float]) -> Figure:
    """Probe loss of one setting over samples, optimizer steps and seconds: a line per arm, its band, and the three targets."""
    with style():
        figure = new_figure(WIDTH, 3.4)
        for axes, cost in zip(figure.subplots(1, len(TITLES), sharey=True), TITLES, strict=True):
            for key, own in rows.groupby(["arm", "accumulation_steps"]):
                arm, num = str(key[0]), int(str(key[1]))
                _line(axes, own, cost, arm, f"{NAMES.get(arm, arm)}{f', N = {num}' if num > 1 else ''}")
            for target in targets:
                axes.axhline(target, color=GREEN, linewidth=0.7, linestyle=(0, (2, 3)))
            _plain_log(axes, "y")
            if cost != "samples":
                _plain_log(axes, "x")
            axes.set_xlabel(TITLES[cost])
        figure.axes[0].set_ylabel("loss on the probe set, nats")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3, fontsize=8.5)
    return figure


def _line(axes: Axes, rows: pd.DataFrame, cost: str, arm: str, label: str) -> None:
    """Mean and 95 % t interval of the log loss at each point; costs are means over the seeds."""
    logs = np.log(np.array([list(curve) for curve in rows["curve_probe_loss"]], dtype=float))
    at = np.array([list(curve) for curve in rows[f"curve_{cost}"]], dtype=float).mean(0)
    mean, low, high = band(logs)
    line = {"color": COLOURS.get(arm, GREEN), "linestyle": LINES.get(arm, "-")}
    axes.plot(at, np.exp(mean), label=label, linewidth=1.3, **line)  # type: ignore[arg-type]
    axes.fill_between(at, np.exp(low), np.exp(high), color=line["color"], alpha=0.13, linewidth=0)


def band(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and 95 % Student t interval at every point of curves [n, points]; of a single curve no band."""
    ends = [statistics.mean_interval(list(column)) for column in curves.T]
    table = np.array([(one.estimate, one.low, one.high) for one in ends])
    return table[:, 0], table[:, 1], table[:, 2]


def _plain_log(axes: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis with labels at 1, 2 and 5 of every decade on y, at decades on x; what is zero lies beyond its end."""
    axes.set_xscale("log", nonpositive="mask") if which == "x" else axes.set_yscale("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=10, subs=(1.0,) if which == "x" else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def figure_tuning(rows: pd.DataFrame, chosen: Mapping[tuple[str, int], float]) -> Figure:
    """Validation loss over the learning rate on the tuning seeds, a line per arm; the tuned rate is marked."""
    with style():
        figure = new_figure(WIDTH * 0.6, 3.0)
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        for key, own in rows.groupby(["arm", "accumulation_steps"]):
            arm, num = str(key[0]), int(str(key[1]))
            if (arm, num) not in chosen:
                continue
            means = own.groupby("lr")["validation_loss"].mean()
            means = means[np.isfinite(means)]
            colour = COLOURS.get(arm, GREEN)
            axes.plot(means.index, means, marker="o", markersize=3.5, color=colour, label=NAMES.get(arm, arm))
            best = chosen[arm, num]
            if best in means.index:
                axes.plot([best], [means[best]], marker="o", markersize=9, color=colour, fillstyle="none", linestyle="")
        rates = sorted(set(rows["lr"]))
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.set(xlabel="learning rate of the trial", ylabel="validation loss, nats")
        axes.legend(fontsize=8)
    return figure
