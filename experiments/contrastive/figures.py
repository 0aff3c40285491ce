"""Figures of methods for in-batch negatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import EXACT, WIDTH
from accumulation_harness.analysis.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SERIES,
    VERMILLION,
    log_axis,
    new_figure,
    steps_axis,
    style,
)
from accumulation_harness.judge import statistics
from accumulation_harness.judge.gates import ALGEBRA_GATE

COLOURS = {"full": INK, "permuted": GREY, "accumulated": VERMILLION, "small": ORANGE, "grad_cache": BLUE, "dual_bank": GREEN,
           "passage_bank": SERIES[4], "momentum_bank": SERIES[5], "temperature_repeated": GREY}  # fmt: skip
MARKS = "osD^vP"
MB, POINTS = 1e6, 100.0


def figure_gradients(rows: pd.DataFrame, words: Callable[[str], str]) -> Figure:
    """Distance of the gradient to the full batch's over N, and the reported loss; a line per method."""
    with style():
        figure = new_figure(WIDTH, 4.0)
        left, right = figure.subplots(1, 2)
        signs = marks(rows["arm"])
        for arm, own in rows.groupby("arm"):
            middle = own.groupby("accumulation_steps")[["gradient_error", "loss", "full_loss"]].median()
            look = {"color": colour(str(arm)), "marker": signs[str(arm)], "markersize": 4}
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


def marks(arms: Iterable[str]) -> dict[str, str]:
    """The sign of each method's points; those of one colour, whose names are neighbours, have different ones."""
    return {arm: MARKS[place % len(MARKS)] for place, arm in enumerate(sorted(set(arms)))}


def figure_bytes(rows: pd.DataFrame, words: Callable[[str], str]) -> Figure:
    """Mean reciprocal rank with its interval against bytes of a step and against the time of a window; a row per N."""
    rows = rows[rows["arm"] != "permuted"]
    numbers = sorted(set(rows.loc[rows["arm"] != "full", "accumulation_steps"])) or [1]
    signs = marks(rows["arm"])
    with style():
        figure = new_figure(WIDTH, 1.6 + 2.6 * len(numbers))
        grid = figure.subplots(len(numbers), 2, sharex="col", sharey=True, squeeze=False)
        for (left, right), num in zip(grid, numbers, strict=True):
            for arm, own in rows[(rows["arm"] == "full") | (rows["accumulation_steps"] == num)].groupby("arm"):
                seeds = (POINTS * own.groupby("seed")["reciprocal_rank"].mean()).tolist()
                look = {"color": colour(str(arm)), "marker": signs[str(arm)]}
                label = {"label": words(str(arm))} if num == numbers[-1] else {}
                _point(left, own["total_bytes"].median() / MB, seeds, look | label)
                _point(right, own["slowness"].median(), seeds, look)
            left.set(title=f"N = {num}", ylabel="mean reciprocal rank, %")
        grid[-1, 0].set(xlabel="memory of a step, MB", xlim=(0, None))  # once all rows, which share it, are drawn
        grid[-1, 1].set(xlabel="time of a window over the full batch's", xlim=(0, None))
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def _point(axes: Axes, place: float, seeds: list[float], look: dict[str, str]) -> None:
    interval = statistics.mean_interval(seeds)
    half = interval.high - interval.estimate
    axes.errorbar(
        place, interval.estimate, yerr=half if half == half else None, markersize=5, linestyle="none", capsize=2,
        color=look["color"], marker=look["marker"], label=look.get("label"),
    )  # fmt: skip


def figure_peaks(rows: pd.DataFrame, words: Callable[[str], str]) -> Figure:
    """The bytes that live in a step over the window's size B at one b; a line per method."""
    with style():
        figure = new_figure(WIDTH, 3.8)
        axes, signs = figure.subplots(), marks(rows["arm"])
        for arm, own in rows.groupby("arm"):
            peaks = own.groupby("window")["peak_bytes"].median()
            axes.plot(
                peaks.index, peaks / MB, color=colour(str(arm)), marker=signs[str(arm)], markersize=4, label=words(str(arm))
            )
        steps_axis(axes, sorted(set(rows["window"])))
        log_axis(axes, "y")
        axes.set(xlabel="window B", ylabel="bytes at the peak of a step, MB")
        figure.legend(loc="outside lower center", ncols=2)
    return figure
