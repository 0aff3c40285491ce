"""Figures of the optimizers: states beside the full batch's, what they remember, and where small steps lead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import ALGEBRA_GATE, Cause, by_optimizer, curves, lines, mean_curve

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
STATES = ("permuted", "accumulated", "reordered", Cause.optimizer_state_per_micro_batch, "small_steps")
PATHS = ("small_steps", "small_steps_rate", "small_steps_memory")


def figure_states(steps: DataFrame) -> Figure:
    """Difference of the state (of the weights where there is none) over optimizer steps, a panel per optimizer."""
    rows = steps[steps["arm"].isin(STATES)].assign(off=steps["state_error"].fillna(steps["parameter_error"]))
    shown = {name: lines(own, "arm", "step", "off", LABELS.get, marker="") for name, own in by_optimizer(rows).items()}
    return curves(shown, "optimizer step", "relative difference", axes=("linear", "log"), level=(ALGEBRA_GATE, "gate"))


def figure_paths(steps: DataFrame) -> Figure:
    """Distance of small steps to the window's weights over windows, a panel per optimizer."""
    most = steps["accumulation_steps"].max()
    rows = steps.query("accumulation_steps == @most and arm in @PATHS")
    shown = {
        f"{name}, N = {most}": lines(own, "arm", "step", "parameter_error", LABELS.get, marker="")
        for name, own in by_optimizer(rows).items()
    }
    return curves(shown, "window", "distance to the window's weights", axes=("linear", "log"))


def figure_memory(memory: DataFrame) -> Figure:
    """Weight of past micro-batches over their age in samples: a panel per entry, of the first trial and the smallest N."""
    chosen = by_optimizer(memory[memory["accumulation_steps"] == memory["accumulation_steps"].min()])
    shown = {
        f"{name}: {entry}": lines(own[own["trial"] == own["trial"].iloc[0]], "arm", "age", "weight", LABELS.get)
        for name, rows in chosen.items()
        for entry, own in rows.groupby("entry")
    }
    return curves(shown, "age in samples", "weight, newest = 1", axes=("linear", "linear"), ylim=(0, 1.05))


def figure_rates(rows: DataFrame, by: str, label: Callable[[float], str], measures: Sequence[str]) -> Figure:
    """Losses over the learning rate, a panel per measure and a line per value of `by`: mean and 95 % interval over seeds."""
    titles = {"tail_loss": "training loss, nats", "held_out_loss": "held-out loss, nats"}
    cells = {
        titles[measure]: tables.cells(rows, [by, "lr"], lambda own, of=measure: tables.paired_comparison(own[of].tolist(), 1.0))  # type: ignore[misc]
        for measure in measures
    }
    shown = {title: lines(own[np.isfinite(own["mean"])], by, "lr", names=label, of=mean_curve) for title, own in cells.items()}
    return curves(shown, "learning rate", "", axes=("steps", "linear"), sharey=False, ncols=6)
