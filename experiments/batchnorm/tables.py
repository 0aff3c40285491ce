"""The experiments on BatchNorm: from their measurements to the tables that they decide by."""

from __future__ import annotations

from typing import Any

import pandas as pd
from pandas import DataFrame, Series

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import Results, statistics
from accumulation_harness.analysis.caveats import DEFAULT_MOMENTUM

EXACT, TRAINED, REMEDIED, GONE_ON = "batch_statistics", "convergence", "remedies", "fine_tuning"  # names of studies
MARGIN = 1.0  # of the equivalence tests, in percentage points of held-out error: three of the 297 held-out images
LEVEL = tables.LEVEL  # of tests, Holm-corrected over their table
WU_HE = {32: (23.6, 24.1), 16: (23.7, 24.2), 8: (24.8, 24.0), 4: (27.3, 24.2), 2: (34.7, 24.1)}  # b: BatchNorm, GroupNorm
RECALIBRATED = "recalibrated_held_out_accuracy"
CELL = ["model", "norm", "effective_batch", "accumulation_steps", "b"]


def exact_rows(results: Results, arm: str, *, all_momenta: bool = False) -> DataFrame:
    """The measurements of one arm under BatchNorm (`study=batch_statistics`), at PyTorch's momentum unless all are asked for.

    Args:
        results: What a store holds.
        arm: Its name.
        all_momenta: Whether every momentum is wanted.

    Returns:
        The rows.
    """
    rows = results.study(EXACT)
    chosen = rows.query("norm == 'batch' and arm == @arm")
    return chosen if all_momenta else chosen[chosen["momentum"] == DEFAULT_MOMENTUM]


def expected_momentum(rows: DataFrame) -> Series[float]:
    """The effective momentum of a window by the formula, 1 - (1 - m)^N.

    Args:
        rows: With columns `momentum` (m) and `accumulation_steps` (N).

    Returns:
        One for each row.
    """
    return 1 - (1 - rows["momentum"]) ** rows["accumulation_steps"]


def trained(results: Results, *, norm: str | None = None) -> DataFrame:
    """List the trained arms.

    Args:
        results: Those of a question that trains.
        norm: The arms of this normalisation only; None: all.

    Returns:
        One row per arm, with its held-out error in percent (`error`) and the samples that a normalisation sees (`b`).
    """
    rows = results.study(TRAINED, [RECALIBRATED, "values_per_channel"])
    rows = rows if norm is None else rows.query("norm == @norm")
    return rows.assign(error=100 * (1 - rows["held_out_accuracy"]), b=rows["micro_batch"])


def fixed_batch(rows: DataFrame) -> DataFrame:
    """The trials that split one B into several N.

    Args:
        rows: Trainings.

    Returns:
        The rows.
    """
    several = rows.query("arm == 'accumulated'").groupby("trial")["accumulation_steps"].nunique() > 1
    return rows[rows["trial"].map(several).fillna(False).astype(bool)]


def error_cells(rows: DataFrame) -> DataFrame:
    """Held-out error over b (b = B: the full batch): mean over seeds and 95 % interval, per model, normalisation and batch.

    Args:
        rows: Trainings.

    Returns:
        Columns `mean`, `low`, `high`.
    """
    shown = _once(rows.query("arm in ['full', 'accumulated']"))
    return tables.cells(shown, CELL, lambda own: tables.paired_comparison(own["error"].tolist(), MARGIN))


def _once(rows: DataFrame) -> DataFrame:
    """Each seed once in a cell: two grids may hold the same training, which is no second seed."""
    return rows.drop_duplicates([*CELL, "arm", "seed"])


def against_full(rows: DataFrame, margin: float) -> DataFrame:
    """Compare the error of each arm with that of its full batch, paired by seed.

    Args:
        rows: What `trained` gives.
        margin: In points: differences within it count as equivalent.

    Returns:
        One row per cell, arm - full, in percentage points: the columns of `tables.paired_comparison`, `p` of the t test,
        `p_holm` over all rows, and `costs`: whether the error is above the full batch's by that. `apart` compares the
        held-out loss with the permuted full batch's: accuracy takes too few values for it. `weights`: the same differences
        with statistics of the training set in both (precise BatchNorm), what is lost in the weights alone; empty where that
        was not measured. `values`: how many values of a channel the statistics of a micro-batch are taken over, b H W, in the
        layer that has the fewest; or NaN.
    """
    full, others = rows.query("arm == 'full'").set_index("trial"), rows.query("arm != 'full'")

    def more(column: str) -> Series[float]:
        above: Series[float] = others[column].astype(float) - others["trial"].map(full[column]).astype(float)
        return above

    paired = others.assign(more=more("error"), loss=more("held_out_loss"), weights=-100 * more(RECALIBRATED))
    null = paired.query("arm == 'permuted'").groupby("trial")["loss"].apply(list)

    def compared(own: DataFrame) -> dict[str, Any]:
        apart, apart_p = statistics.stands_apart(own["loss"].tolist(), [null.get(trial, []) for trial in own["trial"]])
        costs = own["more"].tolist()
        return {
            **tables.paired_comparison(costs, margin), "apart": apart, "apart_p": apart_p, "p": statistics.t_test(costs),
            "weights": own["weights"].dropna().tolist(), "values": own["values_per_channel"].min(),
        }  # fmt: skip

    frame = tables.cells(_once(paired.query("arm == 'accumulated'")), CELL, compared)
    if frame.empty:
        return frame
    frame = frame.assign(p_holm=statistics.holm(frame["p"].fillna(1.0).tolist()))
    return frame.assign(costs=(frame["p_holm"] < LEVEL) & (frame["mean"] > 0))


def between_norms(rows: DataFrame) -> DataFrame:
    """Error with BatchNorm less error with GroupNorm, in percentage points, paired by seed.

    Args:
        rows: A row for each arm of each training, with its held-out error.

    Returns:
        A row for each cell: `gain` with its 95 % interval, and b.
    """
    shown = rows.query("arm in ['full', 'accumulated']")
    keys = ["model", "effective_batch", "accumulation_steps", "b"]
    wide = shown.pivot_table(index=[*keys, "seed"], columns="norm", values="error").reset_index()
    if not {"batch", "group"} <= set(wide.columns):
        return DataFrame()

    def compared(own: DataFrame) -> dict[str, Any]:
        gains = (own["batch"] - own["group"]).tolist()
        found = tables.paired_comparison(gains, MARGIN)
        return {**found, "gain": found["mean"], "p": statistics.t_test(gains), **own[["batch", "group"]].mean()}

    return tables.cells(wide.dropna(subset=["batch", "group"]), keys, compared)


def remedied(results: Results) -> DataFrame:
    """List held-out accuracy over b with each remedy, and what it loses to the full BatchNorm batch.

    Args:
        results: Those of the question `batchnorm`.

    Returns:
        A row per arm and seed: model, effective_batch, b, arm, seed, accuracy (%), lost (points; paired by seed). Arms are
        those of `study=remedies`, "recalibrated" (plain accumulation with the training set's statistics at its weights) and
        "group_norm" (from `study=convergence`, same steps and rate).
    """
    rows = results.study(REMEDIED).assign(accuracy=lambda own: 100 * own["held_out_accuracy"])
    plain = rows.query("arm == 'accumulated'")
    again = plain.assign(arm="recalibrated", accuracy=100 * plain[RECALIBRATED])
    parts = [rows.query("arm not in ['full', 'permuted']"), again]
    if results.has(TRAINED):
        other = trained(results, norm="group")
        parts.append(other.query("arm == 'accumulated'").assign(arm="group_norm", accuracy=lambda own: 100 - own["error"]))
    return _beside_full(pd.concat(parts), rows)


def gone_on(results: Results) -> DataFrame:
    """As `remedied`, for trainings that began at a trained model, compared with the full batch that began there too.

    Args:
        results: What a store holds.

    Returns:
        The rows.
    """
    rows = results.study(GONE_ON).assign(accuracy=lambda own: 100 * own["held_out_accuracy"])
    return _beside_full(rows.query("arm != 'full'"), rows)


def _beside_full(chosen: DataFrame, rows: DataFrame) -> DataFrame:
    pair = ["model", "effective_batch", "steps", "lr", "seed"]
    full = rows.query("arm == 'full'").drop_duplicates(pair)[[*pair, "accuracy"]].rename(columns={"accuracy": "full"})
    both = chosen.merge(full, on=pair)
    both = both.assign(lost=both["full"] - both["accuracy"], b=both["micro_batch"])
    return both[["model", "effective_batch", "b", "arm", "seed", "accuracy", "full", "lost"]]


def forwards_of(results: Results) -> Series[float]:
    """Samples that went through the model over the window's, by model and arm, as `study=batch_statistics` counted them.

    Args:
        results: What a store holds.

    Returns:
        Ratios; empty where none was counted.
    """
    if not results.has(EXACT):
        return Series(dtype=float)
    rows = results.study(EXACT)
    return rows.query("norm == 'batch'").groupby(["model", "arm"])["forwards"].median()
