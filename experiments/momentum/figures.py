"""Figures of the optimizers: states beside the full batch's, what they remember, and where small steps lead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    BLUE,
    DASHED,
    EXACT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SERIES,
    VERMILLION,
    Cause,
    Curve,
    by_optimizer,
    curves,
    log_axis,
    mean_curve,
    panels,
    rate_axis,
)

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


def figure_states(steps: DataFrame) -> Figure:
    """Difference of the state (of the weights where there is none) over optimizer steps, a panel per optimizer."""

    def draw(axes: Axes, rows: DataFrame) -> None:
        stateless = rows["state_error"].isna().all()
        log_axis(axes, "y", most=10)
        for arm in STATES:
            if not stateless or arm != Cause.optimizer_state_per_micro_batch:  # without state that fault is none
                _lines(axes, rows, "parameter_error" if stateless else "state_error", arm)
        axes.axhline(ALGEBRA_GATE, color=INK, linewidth=0.9, linestyle=DASHED, label=f"gate {ALGEBRA_GATE:g}")
        axes.set_ylim(EXACT / 2, 1e3)

    return panels(by_optimizer(steps), draw, 3.2, x="optimizer step", y="relative difference")


def figure_paths(steps: DataFrame) -> Figure:
    """Distance of small steps to the window's weights over windows, a panel per optimizer."""
    most = steps["accumulation_steps"].max()

    def draw(axes: Axes, rows: DataFrame) -> None:
        log_axis(axes, "y")
        for arm in PATHS:
            _lines(axes, rows, "parameter_error", arm)

    shown = {f"{name}, N = {most}": rows for name, rows in by_optimizer(steps.query("accumulation_steps == @most")).items()}
    return panels(shown, draw, 3.0, x="window", y="distance to the window's weights")


def figure_memory(memory: DataFrame) -> Figure:
    """Weight of past micro-batches over their age in samples: a panel per entry, of the first trial and the smallest N."""
    looks = {"accumulated": ("", BLUE, "accumulated"), "small_steps": ("-", ORANGE, "small steps"),
             "small_steps_memory": ("-", GREEN, "small steps, beta^(1/N)")}  # fmt: skip

    def draw(axes: Axes, rows: DataFrame) -> None:
        for arm, (line, colour, label) in looks.items():
            own = rows[(rows["arm"] == arm) & (rows["trial"] == rows["trial"].iloc[0])].sort_values("age")
            axes.plot(own["age"], own["weight"], line, color=colour, marker="o", markersize=3.5, label=label)
        axes.set_ylim(0, 1.05)

    chosen = by_optimizer(memory[memory["accumulation_steps"] == memory["accumulation_steps"].min()])
    shown = {f"{name}: {entry}": own for name, rows in chosen.items() for entry, own in rows.groupby("entry")}
    return panels(shown, draw, 3.0, x="age in samples", y="weight, newest = 1")


def figure_rates(rows: DataFrame, by: str, label: Callable[[float], str], measures: Sequence[str]) -> Figure:
    """Losses over the learning rate, a panel per measure and a line per value of `by`: mean and 95 % interval over seeds."""
    titles = {"tail_loss": "training loss, nats", "held_out_loss": "held-out loss, nats"}
    shown: dict[str, list[Curve]] = {}
    for measure in measures:
        losses = rows.assign(loss=rows[measure])
        cells = tables.cells(losses, [by, "lr"], lambda own: tables.paired_comparison(own["loss"].tolist(), 1.0))
        for place, (value, own) in enumerate(cells[np.isfinite(cells["mean"])].groupby(by)):
            look = {"color": SERIES[place % len(SERIES)], "marker": "o", "label": label(value)}
            shown.setdefault(titles[measure], []).append(mean_curve(own, "lr", **look))
    figure = curves(shown, "learning rate", "", axes=("linear", "linear"), sharey=False, ncols=6)
    for axes in figure.axes:
        rate_axis(axes, rows)
    return figure


def _lines(axes: Axes, rows: DataFrame, measure: str, arm: str) -> None:
    """Draw one line per N; a difference of exactly zero is drawn at the bottom of the panel."""
    for _, own in rows.query("arm == @arm").sort_values("step").groupby("accumulation_steps"):
        axes.plot(own["step"] + 1, own[measure].clip(lower=EXACT), color=COLOURS[arm], linewidth=1, label=LABELS[arm])
