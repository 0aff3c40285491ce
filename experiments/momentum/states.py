"""Optimizer states, their memory, and paths of the weights: from measurements to numbers and tables for `experiments/`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import (
    Cause,
    Material,
    Picture,
    Results,
    Section,
    Table,
    names,
    number,
    section,
    table,
    table_by,
)
from accumulation_harness.analysis.tables import place_of
from accumulation_harness.experiments.momentum import figures

ERRORS = ("state_error", "buffer_error", "state_error_now", "buffer_error_now")  # empty without a state, or without BatchNorm
BETAS = {"momentum_buffer": "momentum", "exp_avg": "beta1", "exp_avg_sq": "beta2"}


def states(results: Results) -> pd.DataFrame:
    """What the study of optimizer states measured."""
    return results.study("optimizer_states", ERRORS)


def spread_in_window(memory: pd.DataFrame) -> pd.Series[float]:
    """Largest weight over smallest - 1, within each window of each trial, arm and entry of the state."""
    weights = memory.groupby(["trial", "arm", "accumulation_steps", "entry", "window"])["weight"]
    spread: pd.Series[float] = weights.max() / weights.min() - 1
    return spread


def half_lives(memory: pd.DataFrame) -> pd.DataFrame:
    """Half-lives of the optimizer state in samples, a row per trial, arm, N and entry of the state.

    `half_life`: measured, from the newest micro-batches of the first and the last window; `predicted`: samples per step x ln 2 /
    -ln beta, with the beta of that step (beta^(1/N) under matched memory).
    """

    def lives(own: pd.DataFrame) -> dict[str, Any]:
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


def path_ratios(states: pd.DataFrame, after_steps: int) -> pd.DataFrame:
    """Distance of N small steps to the window's weights under momentum and Nesterov, a row per trial and N.

    `same`: with the window's settings; `rate`: with the learning rate over N; `memory`: with beta^(1/N) as well; `ratio` = rate /
    memory.
    """
    arms = {"small_steps": "same", "small_steps_rate": "rate", "small_steps_memory": "memory"}
    chosen = states[uncoupled(states)].query(
        "after_steps == @after_steps and arm in @arms and optimizer in ['momentum', 'nesterov']"
    )
    wide = chosen.pivot_table(index=["trial", "optimizer", "accumulation_steps"], columns="arm", values="parameter_error_now")
    wide = wide.reindex(columns=list(arms)).rename(columns=arms).reset_index()
    return wide.assign(ratio=wide["rate"] / wide["memory"]).sort_values("accumulation_steps", ascending=False, kind="stable")


def long_runs(results: Results, fewest_steps: int) -> pd.DataFrame:
    """Every arm after that many steps or more, where nothing but the gradient passes from sample to sample."""
    rows = states(results)
    return rows[(rows["after_steps"] >= fewest_steps) & uncoupled(rows)]


def orders(results: Results, after_steps: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Arms that took the micro-batches of a window in another order, after so many steps; small steps that did, as a control."""
    rows = states(results).query("after_steps == @after_steps")
    return rows.query("arm == 'reordered'"), rows.query("arm == 'small_steps_reordered'")


def uncoupled(rows: pd.DataFrame) -> pd.Series[bool]:
    """Arms in which nothing but the gradient passes from sample to sample: neither BatchNorm nor dropout."""
    return (rows["norm"] != "batch") & (rows["dropout"] == 0)


def largest_error(rows: pd.DataFrame, *columns: str) -> float:
    """The largest of these errors; SGD has no state and so no error of it, any other error that is NaN counts as infinite."""
    values = rows.assign(state_error=rows["state_error"].where(rows["optimizer"] != "sgd", 0.0))
    return float(values[list(columns)].astype(float).fillna(math.inf).to_numpy().max())


def smallest_difference(rows: pd.DataFrame) -> float:
    """The smallest difference among arms that have to differ: of the optimizer state, or of the weights under SGD."""
    error = rows["state_error_now"].where(rows["optimizer"] != "sgd", rows["parameter_error_now"])
    return error.astype(float).fillna(math.inf).min()


def beta2_trials(results: Results) -> pd.DataFrame:
    """Trainings under Adam at a small batch, with the window's beta2 and with beta2^(1/N)."""
    return results.study("batch_sizes").query("optimizer == 'adam' and accumulation_steps > 1")


def beta2_differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Loss under the window's beta2 minus that under beta2^(1/N), from `beta2_trials`, a row per seed: above 0 the rule helps.

    `training`: over the last tenth of the windows, mean over the learning rates; `held_out`: each beta2 at its best rate.
    """
    best = at_best_rate(rows, ["beta2"])
    if rows["beta2"].nunique() < 2 or best["beta2"].nunique() < 2:
        return pd.DataFrame(columns=["training", "held_out"], dtype=float)
    training = rows.groupby(["seed", "beta2"])["tail_loss"].mean().unstack()
    held_out = best.pivot(index="seed", columns="beta2", values="held_out_loss")
    fixed, matched = training.columns.min(), training.columns.max()
    columns = {"training": training[fixed] - training[matched], "held_out": held_out[fixed] - held_out[matched]}
    return pd.DataFrame(columns).dropna()


def states_section(material: Material, rows: pd.DataFrame) -> Section | None:
    """How far state and weights are off over the steps: a figure of one trial per optimizer, and a table of all."""
    if rows.empty:
        return None
    first = rows.query("workload == 'digits'").drop_duplicates("optimizer")
    steps = material.read_steps(first["trial"]).merge(first[["trial", "optimizer"]], on="trial")
    picture = Picture(
        "states",
        figures.figure_states(steps),
        "Relative difference to the reference over optimizer steps, one panel per optimizer: correct accumulation and another "
        "order stay near 1e-15, state per micro-batch and small steps near 1.",
        "Relative difference of the optimizer state (of the weights under SGD, which keeps none) over optimizer steps in "
        "float64, one trial per optimizer. Another order is compared with the usual order of the same micro-batches, all other "
        "arms with the full batch.",
    )
    return section(f"State and weights over {rows['after_steps'].max():.0f} steps", picture, state_table(rows))


def state_table(rows: pd.DataFrame) -> Table:
    """Errors by model and optimizer: the largest of arms that have to agree, the smallest of those that have to differ."""
    head = (
        "model | optimizer | N | trials | accumulated: state | weights | another order: state | "
        "permuted full batch | state per micro-batch | small steps"
    )
    cells = []
    models = rows["workload"] + " " + rows["norm"]
    groups = sorted(rows.groupby([models, "optimizer"]), key=lambda pair: (pair[0][0], place_of(pair[0][1])))
    for (model, optimizer), own in groups:
        by_arm = dict(iter(own.groupby("arm")))
        right = by_arm["accumulated"]
        stateless = right["state_error"].isna().all()
        small = "parameter_error_now" if stateless else "state_error_now"
        cells.append((
            model, optimizer, names(right["accumulation_steps"]),
            right["trial"].nunique(), right["state_error"].max(), right["parameter_error"].max(),
            by_arm["reordered"]["state_error"].max(),
            by_arm["permuted"]["parameter_error" if stateless else "state_error"].max(),
            "-" if stateless else number(by_arm[Cause.optimizer_state_per_micro_batch][small].min()),
            by_arm["small_steps"][small].min(),
        ))  # fmt: skip
    caption = (
        "Relative differences in float64. For accumulation, another order and the permuted full batch, the largest at any step, "
        "over trials and N; for the arms that have to differ, the smallest at the last step. SGD keeps no state: its weights are "
        "shown instead."
    )
    return table(head, cells, caption)


def at_best_rate(rows: pd.DataFrame, by: Sequence[str], measure: str = "held_out_loss") -> pd.DataFrame:
    """The trainings at the learning rate whose mean of `measure` over seeds is lowest, for each value of the columns `by`.

    A rate at which the measure of some seed is NaN is not chosen.
    """
    if rows.empty:
        return rows
    means = rows.assign(**{measure: rows[measure].astype(float).fillna(math.inf)}).groupby([*by, "lr"])[measure].mean()
    best = means.groupby(list(by)).idxmin()
    keys = pd.DataFrame([key if isinstance(key, tuple) else (key,) for key in best], columns=[*by, "lr"])
    return rows.merge(keys, on=[*by, "lr"])


def equal_table(results: Results) -> Table | None:
    """N small steps and one window under momentum, at equal samples and at equal steps: means over seeds with 95 % intervals."""
    rows = results.study("batch_sizes").query("optimizer == 'momentum'")
    if rows.empty:
        return None
    head = (
        "batch | learning rate | momentum | samples | steps | held-out loss | accuracy | "
        "after as many steps as the window | seeds"
    )
    columns = (
        "batch", "lr", "momentum", ("samples", "{:.0f}".format), ("optimizer_steps", "{:.0f}".format), "held_out_loss interval",
        ("held_out_accuracy mean", "{:.1%}".format), "early_held_out_loss interval", "seed n",
    )  # fmt: skip
    caption = (
        "Held-out loss in nats per sample, mean and 95% t interval over seeds. The column of the held-out loss compares at equal "
        "samples, the last but one at equal steps, where the small batch has seen 1/N of the samples. Holds for this model and "
        "length."
    )
    return table_by(rows, "batch lr momentum", head, columns, caption)
