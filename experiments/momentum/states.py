"""Optimizer states, their memory, and paths of the weights: from measurements to numbers and tables for `experiments/`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame, Series

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    Cause,
    Material,
    Picture,
    Results,
    Section,
    Table,
    by_optimizer,
    curves,
    lines,
    names,
    needed,
    section,
    table_by,
)
from accumulation_harness.experiments.shared.tuning import at_best_rate

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
ERRORS = ("state_error", "buffer_error", "state_error_now", "buffer_error_now")  # empty without a state, or without BatchNorm
BETAS = {"momentum_buffer": "momentum", "exp_avg": "beta1", "exp_avg_sq": "beta2"}


def states(results: Results) -> DataFrame:
    """What the study of optimizer states measured.

    Args:
        results: What a store holds.

    Returns:
        The rows.
    """
    return results.study("optimizer_states", ERRORS)


def spread_in_window(memory: DataFrame) -> Series[float]:
    """Largest weight over smallest - 1, within each window of each trial, arm and entry of the state.

    Args:
        memory: Rows of the study `optimizer_memory`.

    Returns:
        One for each window.
    """
    weights = memory.groupby(["trial", "arm", "accumulation_steps", "entry", "window"])["weight"]
    spread: Series[float] = weights.max() / weights.min() - 1
    return spread


def half_lives(memory: DataFrame) -> DataFrame:
    """Measure half-lives of the optimizer state in samples.

    Args:
        memory: Rows of the study `optimizer_memory`.

    Returns:
        A row per trial, arm, N and entry of the state. `half_life`: measured, from the newest micro-batches of the first and
        the last window; `predicted`: samples per step x ln 2 / -ln beta, with the beta of that step (beta^(1/N) under matched
        memory).
    """

    def lives(own: DataFrame) -> dict[str, Any]:
        ends = own[own["position"] == own["position"].max()].sort_values("age")
        newest, oldest = ends.iloc[0], ends.iloc[-1]
        beta, batch = float(newest[BETAS[newest["entry"]]]), float(newest["effective_batch"])
        # Matched memory is the window's.
        samples = batch / newest["accumulation_steps"] if newest["arm"] == "small_steps" else batch
        return {
            "optimizer": newest["optimizer"],
            "half_life": (oldest["age"] - newest["age"]) * math.log(2) / math.log(newest["weight"] / oldest["weight"]),
            "predicted": samples * math.log(2) / -math.log(beta),
        }

    return tables.cells(memory, ["trial", "arm", "accumulation_steps", "entry"], lives)


def path_ratios(states: DataFrame, after_steps: int) -> DataFrame:
    """Measure the distance of N small steps to the window's weights under momentum and Nesterov.

    Args:
        states: Rows of the study `optimizer_states`.
        after_steps: The checkpoint.

    Returns:
        A row per trial and N. `same`: with the window's settings; `rate`: with the learning rate over N; `memory`: with
        beta^(1/N) as well; `ratio` = rate / memory.
    """
    arms = {"small_steps": "same", "small_steps_rate": "rate", "small_steps_memory": "memory"}
    chosen = states[uncoupled(states)].query(
        "after_steps == @after_steps and arm in @arms and optimizer in ['momentum', 'nesterov']"
    )
    wide = chosen.pivot_table(index=["trial", "optimizer", "accumulation_steps"], columns="arm", values="parameter_error_now")
    wide = wide.reindex(columns=list(arms)).rename(columns=arms).reset_index()
    return wide.assign(ratio=wide["rate"] / wide["memory"]).sort_values("accumulation_steps", ascending=False, kind="stable")


def long_runs(results: Results, fewest_steps: int) -> DataFrame:
    """List the arms with that many steps or more in which nothing but the gradient passes from sample to sample.

    Args:
        results: What a store holds.
        fewest_steps: Steps that a run must have made.

    Returns:
        The rows.
    """
    rows = states(results)
    return rows[(rows["after_steps"] >= fewest_steps) & uncoupled(rows)]


def orders(results: Results, after_steps: int) -> tuple[DataFrame, DataFrame]:
    """Arms that took the micro-batches of a window in another order, after so many steps; small steps that did, as a control.

    Args:
        results: What a store holds.
        after_steps: After how many steps.

    Returns:
        Reordered arms, and the control.
    """
    rows = states(results).query("after_steps == @after_steps")
    return rows.query("arm == 'reordered'"), rows.query("arm == 'small_steps_reordered'")


def uncoupled(rows: DataFrame) -> Series[bool]:
    """Arms in which nothing but the gradient passes from sample to sample: neither BatchNorm nor dropout.

    Args:
        rows: From `states`.

    Returns:
        A flag for each row.
    """
    return (rows["norm"] != "batch") & (rows["dropout"] == 0)


def largest_error(rows: DataFrame, *columns: str) -> float:
    """The largest of these errors; SGD has no state and so no error of it, any other error that is NaN counts as infinite.

    Args:
        rows: From `states`.
        columns: Names of errors.

    Returns:
        The largest.
    """
    values = rows.assign(state_error=rows["state_error"].where(rows["optimizer"] != "sgd", 0.0))
    return float(values[list(columns)].astype(float).fillna(math.inf).to_numpy().max())


def smallest_difference(rows: DataFrame) -> float:
    """The smallest difference among arms that have to differ: of the optimizer state, or of the weights under SGD.

    Args:
        rows: From `states`.

    Returns:
        The smallest.
    """
    error = rows["state_error_now"].where(rows["optimizer"] != "sgd", rows["parameter_error_now"])
    return error.astype(float).fillna(math.inf).min()


def beta2_trials(results: Results) -> DataFrame:
    """Trainings under Adam at a small batch, with the window's beta2 and with beta2^(1/N).

    Args:
        results: What a store holds.

    Returns:
        The rows.
    """
    return results.study("batch_sizes").query("optimizer == 'adam' and accumulation_steps > 1")


def beta2_differences(rows: DataFrame) -> DataFrame:
    """Compare the loss under the window's beta2 with that under beta2^(1/N).

    Args:
        rows: Those of `beta2_trials`.

    Returns:
        Their difference, a row per seed: above 0 the rule helps. `training`: over the last tenth of the windows, mean over
        the learning rates; `held_out`: each beta2 at its best rate.
    """
    best = at_best_rate(rows, ["beta2"], "held_out_loss")
    if rows["beta2"].nunique() < 2 or best["beta2"].nunique() < 2:
        return DataFrame(columns=["training", "held_out"], dtype=float)
    training = rows.groupby(["seed", "beta2"])["tail_loss"].mean().unstack()
    held_out = best.pivot(index="seed", columns="beta2", values="held_out_loss")
    fixed, matched = training.columns.min(), training.columns.max()
    columns = {"training": training[fixed] - training[matched], "held_out": held_out[fixed] - held_out[matched]}
    return DataFrame(columns).dropna()


def states_section(material: Material, rows: DataFrame) -> Section:
    """How far state and weights are off over the steps: a figure of one trial per optimizer, and a table of all.

    Args:
        material: Results and step rows of the experiment.
        rows: From `states`.

    Returns:
        The section.
    """
    needed(rows)
    first = rows.query("workload == 'digits'").drop_duplicates("optimizer")
    steps = material.read_steps(first["trial"]).merge(first[["trial", "optimizer"]], on="trial")
    picture = Picture(
        "states",
        _figure_states(steps),
        "Relative difference to the reference over optimizer steps, one panel per optimizer: correct accumulation and another "
        "order stay near 1e-15, state per micro-batch and small steps near 1.",
        "Relative difference of the optimizer state (of the weights under SGD, which keeps none) over optimizer steps in "
        "float64, one trial per optimizer. Another order is compared with the usual order of the same micro-batches, all other "
        "arms with the full batch.",
    )
    return section(f"State and weights over {rows['after_steps'].max():.0f} steps", picture, _state_table(rows))


def _state_table(rows: DataFrame) -> Table:
    """Errors by model and optimizer: the largest of arms that have to agree, the smallest of those that have to differ."""
    head = (
        "model | optimizer | N | trials | accumulated: state | weights | another order: state | "
        "permuted full batch | state per micro-batch | small steps"
    )
    rows = tables.in_order(rows)
    rows = rows.assign(
        model=rows["workload"] + " " + rows["norm"],
        error=rows["state_error"].fillna(rows["parameter_error"]),
        error_now=rows["state_error_now"].fillna(rows["parameter_error_now"]),
    )

    def of(arm: str, column: str, how: Any = "max") -> Callable[[DataFrame], object]:
        return lambda own: own.loc[own["arm"] == arm, column].agg(how)

    columns = (
        "model", "optimizer", of("accumulated", "accumulation_steps", names), of("accumulated", "trial", "nunique"),
        of("accumulated", "state_error"), of("accumulated", "parameter_error"), of("reordered", "state_error"),
        of("permuted", "error"), of(Cause.optimizer_state_per_micro_batch, "state_error_now", "min"),
        of("small_steps", "error_now", "min"),
    )  # fmt: skip
    caption = (
        "Relative differences in float64. For accumulation, another order and the permuted full batch, the largest at any step, "
        "over trials and N; for the arms that have to differ, the smallest at the last step. SGD keeps no state: its weights are "
        "shown instead."
    )
    return table_by(rows, "model optimizer", head, columns, caption, sort=False)


def _figure_states(steps: DataFrame) -> Figure:
    """Difference of the state (of the weights where there is none) over optimizer steps, a panel per optimizer."""
    rows = steps[steps["arm"].isin(STATES)].assign(off=steps["state_error"].fillna(steps["parameter_error"]))
    shown = {name: lines(own, "arm", "step", "off", LABELS.get, marker="") for name, own in by_optimizer(rows).items()}
    return curves(shown, "optimizer step", "relative difference", axes=("linear", "log"), level=(ALGEBRA_GATE, "rounding limit"))


def figure_paths(steps: DataFrame) -> Figure:
    """Distance of small steps to the window's weights over windows, a panel per optimizer.

    Args:
        steps: Step rows of the drawn trials.

    Returns:
        The figure.
    """
    most = steps["accumulation_steps"].max()
    rows = steps.query("accumulation_steps == @most and arm in @PATHS")
    shown = {
        f"{name}, N = {most}": lines(own, "arm", "step", "parameter_error", LABELS.get, marker="")
        for name, own in by_optimizer(rows).items()
    }
    return curves(shown, "window", "distance to the window's weights", axes=("linear", "log"))


def figure_memory(memory: DataFrame) -> Figure:
    """Weight of past micro-batches over their age in samples: a panel per entry, of the first trial and the smallest N.

    Args:
        memory: Rows of the study `optimizer_memory`.

    Returns:
        The figure.
    """
    chosen = by_optimizer(memory[memory["accumulation_steps"] == memory["accumulation_steps"].min()])
    shown = {
        f"{name}: {entry}": lines(own[own["trial"] == own["trial"].iloc[0]], "arm", "age", "weight", LABELS.get)
        for name, rows in chosen.items()
        for entry, own in rows.groupby("entry")
    }
    return curves(shown, "age in samples", "weight, newest = 1", axes=("linear", "linear"), ylim=(0, 1.05))
