"""Figures of methods for in-batch negatives."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.figures.common import EXACT, WIDTH
from analysis.figures.style import BLUE, GREEN, GREY, INK, ORANGE, SERIES, VERMILLION, log_axis, new_figure, steps_axis, style
from harness.judge import statistics
from harness.judge.gates import ALGEBRA_GATE

COLOURS = {"full": INK, "permuted": GREY, "accumulated": VERMILLION, "small": ORANGE, "grad_cache": BLUE, "dual_bank": GREEN,
           "passage_bank": SERIES[4], "momentum_bank": SERIES[5], "temperature_repeated": GREY}  # fmt: skip
MARKS = "osD^vP"
MB, POINTS = 1e6, 100.0


def figure_gradients(rows: pd.DataFrame, words: Callable[[str], str]) -> Figure:
    """Distance of the gradient to the full batch's over N, and the reported loss; a line per method."""
    with style():
        figure = new_figure(WIDTH, 4.0)
        left, right = figure.subplots(1, 2)
        for arm, own in rows.groupby("arm"):
            middle = own.groupby("accumulation_steps")[["gradient_error", "loss", "full_loss"]].median()
            look = {
                "color": colour(str(arm)),
                "marker": mark(str(arm)),
                "markersize": 4,
            }
            left.plot(middle.index, middle["gradient_error"].clip(lower=EXACT), label=words(str(arm)), **look)
            right.plot(middle.index, middle["loss"], **look)
        right.plot(middle.index, middle["full_loss"], color=INK, linestyle=(0, (4, 3)), label="the full batch's")
        log_axis(left, "y")
        left.axhline(ALGEBRA_GATE, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        for axes in (left, right):
            steps_axis(axes, sorted(set(rows["accumulation_steps"])))
            axes.set_xlabel("accumulation steps N")
        left.set_ylabel("gradient off the full batch's")
        right.set_ylabel("reported loss, nats")
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def colour(arm: str) -> str:
    """The colour of a method, whatever the size of its bank."""
    return COLOURS.get(arm.partition("@")[0], GREY)


def mark(arm: str) -> str:
    """The sign of a method's points."""
    return MARKS[len(arm) % len(MARKS)]


def figure_bytes(rows: pd.DataFrame, words: Callable[[str], str]) -> Figure:
    """Mean reciprocal rank with its interval against bytes of a step and against the time of a window."""
    with style():
        figure = new_figure(WIDTH, 4.6)
        left, right = figure.subplots(1, 2, sharey=True)
        shown = set[str]()
        for (arm, num), own in rows[rows["arm"] != "permuted"].groupby(["arm", "accumulation_steps"]):
            seeds = (POINTS * own.groupby("seed")["reciprocal_rank"].mean()).tolist()
            label = words(str(arm)) if arm not in shown else None
            shown.add(str(arm))
            for axes, place in ((left, own["total_bytes"].median() / MB), (right, own["slowness"].median())):
                _point(axes, float(place), seeds, str(arm), str(num), label if axes is left else None)
        left.set(xlabel="memory of a step, MB", ylabel="mean reciprocal rank, %", xlim=(0, None))
        right.set(xlabel="time of a window over the full batch's", xlim=(0, None))
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def _point(axes: Axes, place: float, seeds: list[float], arm: str, num: str, label: str | None) -> None:
    interval = statistics.mean_interval(seeds)
    half = interval.high - interval.estimate
    axes.errorbar(place, interval.estimate, yerr=half if half == half else None, color=colour(arm), label=label,
                  marker=mark(arm), markersize=5, linestyle="none", capsize=2)  # fmt: skip
    axes.annotate(f"N={num}", (place, interval.estimate), xytext=(4, 4), textcoords="offset points", fontsize=7, color=INK)


def figure_peaks(rows: pd.DataFrame, words: Callable[[str], str]) -> Figure:
    """The bytes that live in a step over the window's size B at one b; a line per method."""
    with style():
        figure = new_figure(WIDTH, 3.8)
        axes = figure.subplots()
        for arm, own in rows.groupby("arm"):
            peaks = own.groupby("window")["peak_bytes"].median()
            axes.plot(peaks.index, peaks / MB, color=colour(str(arm)), marker=mark(str(arm)), markersize=4, label=words(str(arm)))
        steps_axis(axes, sorted(set(rows["window"])))
        log_axis(axes, "y")
        axes.set(xlabel="window B", ylabel="bytes at the peak of a step, MB")
        figure.legend(loc="outside lower center", ncols=2)
    return figure
