"""Figures of the optimizers: states beside the full batch's, what they remember, and where small steps lead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from accumulation_harness.analysis.figures.common import WIDTH
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
    power_of_two,
    style,
)
from accumulation_harness.analysis.tables import optimizers_of, place_of
from accumulation_harness.judge import statistics
from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.gates import ALGEBRA_GATE

LABELS = {
    "permuted": "full batch, rows permuted",
    "accumulated": "accumulated",
    "reordered": "accumulated, another order",
    Cause.optimizer_state_per_micro_batch: "state per micro-batch (a fault)",
    "small_steps": "small steps",
    "small_steps_reordered": "small steps, another order",
    "small_steps_rate": "small steps, rate over N",
    "small_steps_memory": "small steps, rate and beta^(1/N)",
}
COLOURS = {"permuted": GREY, "accumulated": BLUE, "reordered": GREEN, Cause.optimizer_state_per_micro_batch: VERMILLION,
           "small_steps": ORANGE, "small_steps_rate": VERMILLION, "small_steps_memory": BLUE}  # fmt: skip
STATES = ("permuted", "accumulated", "reordered", Cause.optimizer_state_per_micro_batch, "small_steps")
PATHS = ("small_steps", "small_steps_rate", "small_steps_memory")
MEMORIES = ("accumulated", "small_steps", "small_steps_memory")
ZERO = 1e-17  # where a difference of exactly zero is drawn


def figure_states(steps: pd.DataFrame) -> Figure:
    """Difference of the state (of the weights where there is none) over optimizer steps, a panel per optimizer."""
    names = optimizers_of(steps)
    with style():
        figure = new_figure(WIDTH, 3.2)
        grid = figure.subplots(1, len(names), sharey=True, squeeze=False)
        for axes, name in zip(grid[0], names, strict=True):
            own = steps[steps["optimizer"] == name]
            measure = "parameter_error" if own["state_error"].isna().all() else "state_error"
            log_axis(axes, "y", most=10)
            axes.axhline(ALGEBRA_GATE, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            for arm in STATES:
                if measure == "state_error" or arm != Cause.optimizer_state_per_micro_batch:  # without state that fault is none
                    _lines(axes, own[own["arm"] == arm], measure, COLOURS[arm])
            axes.set(title=name, xlabel="optimizer step", ylim=(ZERO / 2, 1e3))
        grid[0, 0].set_ylabel("relative difference")
        _legend(figure, STATES, (f"gate {ALGEBRA_GATE:g}",))
    return figure


def figure_paths(steps: pd.DataFrame) -> Figure:
    """Distance of small steps to the window's weights over windows, a panel per optimizer."""
    names = optimizers_of(steps)
    with style():
        figure = new_figure(WIDTH, 3.0)
        grid = figure.subplots(1, len(names), sharey=True, squeeze=False)
        for axes, name in zip(grid[0], names, strict=True):
            own = steps[(steps["optimizer"] == name) & (steps["accumulation_steps"] == steps["accumulation_steps"].max())]
            log_axis(axes, "y")
            for arm in PATHS:
                _lines(axes, own[own["arm"] == arm], "parameter_error", COLOURS[arm])
            axes.set(title=f"{name}, N = {own['accumulation_steps'].max()}", xlabel="window")
        grid[0, 0].set_ylabel("distance to the window's weights")
        _legend(figure, PATHS)
    return figure


def figure_memory(memory: pd.DataFrame) -> Figure:
    """Weight of past micro-batches over their age in samples: a panel per entry, of the first trial and the smallest N."""
    chosen = memory[memory["accumulation_steps"] == memory["accumulation_steps"].min()]
    panels = [
        (optimizer, entry, own[own["trial"] == own["trial"].iloc[0]])
        for (optimizer, entry), own in chosen.groupby(["optimizer", "entry"])
    ]
    panels.sort(key=lambda panel: (place_of(panel[0]), panel[1]))
    with style():
        figure = new_figure(WIDTH, 3.0)
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
        for axes, (optimizer, entry, own) in zip(grid[0], panels, strict=True):
            for arm in MEMORIES:
                rows = own[own["arm"] == arm].sort_values("age")
                line = "" if arm == "accumulated" else "-"
                axes.plot(rows["age"], rows["weight"], line, color=_memory_colour(arm), marker="o", markersize=3.5)
            axes.set(title=f"{optimizer}: {entry}", xlabel="age in samples", ylim=(0, 1.05))
        grid[0, 0].set_ylabel("weight, newest = 1")
        labels = {"accumulated": "accumulated", "small_steps": "small steps", "small_steps_memory": "small steps, beta^(1/N)"}
        handles = [Line2D([], [], color=_memory_colour(arm), marker="o", markersize=3.5, label=labels[arm]) for arm in MEMORIES]
        figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


def _memory_colour(arm: str) -> str:
    return GREEN if arm == "small_steps_memory" else COLOURS[arm]


def figure_rates(rows: pd.DataFrame, by: str, label: Callable[[float], str], measures: Sequence[str]) -> Figure:
    """Losses over the learning rate, a panel per measure and a line per value of `by`: mean and 95 % interval over seeds."""
    titles = {"tail_loss": "training loss", "held_out_loss": "held-out loss"}
    with style():
        figure = new_figure(WIDTH, 3.2)
        rates = sorted(set(rows["lr"]))
        for axes, measure in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True):
            axes.set_xscale("log", base=2)
            for place, (value, own) in enumerate(rows.groupby(by)):
                rate_line(axes, own, measure, SERIES[place % len(SERIES)], label(value))  # type: ignore[arg-type]
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes.minorticks_off()
            axes.set(xlabel="learning rate", ylabel=f"{titles[measure]}, nats")
        axes.legend()
    return figure


def rate_line(axes: Axes, rows: pd.DataFrame, measure: str, colour: str, label: str) -> None:
    """Mean with its 95 % t interval over the learning rate; rates at which a seed has no number are left out."""
    points = [
        (float(own["lr"].iloc[0]), statistics.mean_interval(list(own[measure].astype(float)))) for _, own in rows.groupby("lr")
    ]
    points = [(lr, one) for lr, one in points if np.isfinite(one.estimate)]
    means = np.array([one.estimate for _, one in points])
    reach = np.array([[one.estimate - one.low for _, one in points], [one.high - one.estimate for _, one in points]])
    axes.errorbar([lr for lr, _ in points], means, yerr=np.nan_to_num(reach), color=colour, marker="o", markersize=4, label=label)


def figure_eps(rows: pd.DataFrame) -> Figure:
    """Error of Adam's displacement without 1/N over eps: after the first step, after all steps, and beside eps/N."""
    series = (("fault_error_first", BLUE, "o", "first step"), ("fault_error", ORANGE, "s", "all steps"),
              ("as_if_error", GREEN, "D", "all steps, against the right gradient at eps/N"))  # fmt: skip
    with style():
        figure = new_figure(WIDTH, 3.3)
        axes = figure.subplots()
        log_axis(axes, "x", most=10)
        log_axis(axes, "y", most=10)
        predicted = rows.groupby("eps")["predicted_first"].median()
        axes.plot(predicted.index, predicted, color=BLUE, linewidth=1, label="first step, closed form")
        for column, colour, mark, label in series:
            axes.plot(rows["eps"], rows[column].clip(lower=ZERO), mark, color=colour, markersize=4.5, alpha=0.7, label=label)
        axes.set(xlabel="eps", ylabel="relative difference of the displacement")
        axes.legend(loc="center right")
    return figure


def figure_second_moment(rows: pd.DataFrame) -> Figure:
    """Measured over predicted ratio of the two second moments, a colour per N."""
    with style():
        figure = new_figure(WIDTH, 3.3)
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(power_of_two))
        ends = [1.0, 1.1 * float(rows["ratio"].max())]
        axes.plot(ends, ends, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
        for place, (num, own) in enumerate(rows.groupby("accumulation_steps")):
            axes.plot(
                own["predicted_without_replacement"],
                own["ratio"],
                "o",
                color=SERIES[place % len(SERIES)],
                markersize=5,
                label=f"N = {num:g}",
            )
        axes.set(xlabel="predicted from per-sample gradients", ylabel="measured")
        axes.legend()
    return figure


def _lines(axes: Axes, rows: pd.DataFrame, measure: str, colour: str) -> None:
    """Draw one line per N; a difference of exactly zero is drawn at the bottom of the panel."""
    for _, own in rows.groupby("accumulation_steps"):
        ordered = own.sort_values("step")
        axes.plot(ordered["step"] + 1, ordered[measure].clip(lower=ZERO), color=colour, linewidth=1)


def _legend(figure: Figure, arms: tuple[str, ...], gates: tuple[str, ...] = ()) -> None:
    handles = [Line2D([], [], color=COLOURS[arm], label=LABELS[arm]) for arm in arms]
    handles += [Line2D([], [], color=INK, linestyle=(0, (4, 3)), label=gate) for gate in gates]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, columnspacing=1.4)
