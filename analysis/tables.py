"""From rows of arms to the tables of the report: pure functions, DataFrame in, DataFrame out."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from accumulation_harness import config
from accumulation_harness.judge import statistics
from accumulation_harness.results.cells import SEVERITY, by_cell
from accumulation_harness.results.judged_arm import VERDICT_COLUMNS, VerdictRow

WORST_FIRST = tuple(map(str, reversed(SEVERITY)))
PRECISIONS = ("float64", "float32", "float16", "bfloat16")
OPTIMIZERS = tuple(map(str, config.OPTIMIZERS))
NORM_NAMES = {"none": "no normalisation", "group": "GroupNorm", "layer": "LayerNorm", "batch": "BatchNorm"}
NORMS = tuple(NORM_NAMES)  # BatchNorm last: the exception beside the rule
ROW = ["workload", "norm", "optimizer"]
CELL = [*ROW, "precision", "arm", "accumulation_steps"]
MEASURES = ("held_out_loss", "tail_loss")
MAX_FACETS = 6
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", *"\uff1d\uff0b\uff0d\uff20")  # makes a spreadsheet compute; the last: wide forms
LEVEL = 0.05


def place_of(optimizer: object) -> int:
    """Place an optimizer in the customary order.

    Args:
        optimizer: Its name.

    Returns:
        Its position in `OPTIMIZERS`; one that is not ours comes last.
    """
    return OPTIMIZERS.index(str(optimizer)) if optimizer in OPTIMIZERS else len(OPTIMIZERS)


def optimizers_of(rows: DataFrame) -> list[str]:
    """The optimizers of the rows, in their customary order.

    Args:
        rows: Any table with a column `optimizer`.

    Returns:
        Each name once.
    """
    return sorted(set(rows["optimizer"]), key=place_of)


def verdicts(arms: DataFrame) -> DataFrame:
    """`verdicts.csv`: the arms with its columns, in its order.

    Args:
        arms: Judged arms, a row each.

    Returns:
        Columns as in `verdicts.csv`.
    """
    return arms[list(VERDICT_COLUMNS)]


def to_csv(frame: DataFrame) -> bytes:
    """Write CSV that reads back exactly: a double is its shortest repr, NaN `nan`, truth `True` or `False`.

    A text that a spreadsheet would take for a formula has an apostrophe before it, and a carriage return, which would begin a
    row, is spelled out.

    Args:
        frame: Any table.

    Returns:
        UTF-8.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(frame.columns)
    writer.writerows(zip(*(_inert(frame[name].tolist()) for name in frame.columns), strict=True))
    return text.getvalue().encode()


def _inert(cells: list[Any]) -> list[Any]:
    texts = {cell for cell in cells if isinstance(cell, str)}
    inert = {text: ("'" if text.startswith(FORMULA) else "") + text.replace("\r", "\\r") for text in texts}
    return [inert.get(cell, cell) for cell in cells] if texts else cells


def verdict_counts(arms: DataFrame) -> Series[int]:
    """Count how many arms have each verdict.

    Args:
        arms: A table with a column `verdict`, a row for each arm.

    Returns:
        Counts by verdict, worst first; verdicts that do not occur are left out.
    """
    counts = arms["verdict"].value_counts()
    return counts.reindex([verdict for verdict in WORST_FIRST if verdict in counts])


def in_order(frame: DataFrame) -> DataFrame:
    """Sort by workload, norm, optimizer, precision and N, each in its customary order.

    Args:
        frame: A table with some of these columns.

    Returns:
        The rows in order, numbered anew; rows that are alike keep theirs.
    """
    customary = {"norm": NORMS, "optimizer": OPTIMIZERS, "precision": PRECISIONS}
    by = [name for name in CELL if name in frame]

    def rank(column: Series[Any]) -> Series[Any]:
        known = customary.get(str(column.name))
        return column if known is None else column.map({value: place for place, value in enumerate(known)}).fillna(len(known))

    return frame.sort_values(by, key=rank, kind="stable", ignore_index=True)


def rows(arms: DataFrame) -> list[VerdictRow]:
    """The verdict rows of arms.

    Args:
        arms: Judged arms, a row each.

    Returns:
        One for each arm.
    """
    columns = (arms[name].tolist() for name in VERDICT_COLUMNS)
    return [VerdictRow(**dict(zip(VERDICT_COLUMNS, row, strict=True))) for row in zip(*columns, strict=True)]


def matrix(arms: DataFrame) -> DataFrame:
    """One row per cell (`ArmCell`) of the correct arms and the control: its worst verdict, `agreeing` of its `trials` have it.

    Args:
        arms: Judged arms, a row each.

    Returns:
        Cells in their customary order.
    """
    return in_order(DataFrame([vars(cell) for cell in by_cell(rows(arms.query("arm in ['accumulated', 'permuted']")))]))


def facets(frame: DataFrame) -> list[str]:
    """Models (workload and norm) in their customary order, the first MAX_FACETS of them: the columns of a figure.

    Args:
        frame: Rows with a column `model`.

    Returns:
        Names of models.
    """
    settings = frame[["model", *(name for name in CELL if name in frame)]].drop_duplicates()
    return list(dict.fromkeys(in_order(settings)["model"]))[:MAX_FACETS]


def drawn(arms: DataFrame) -> DataFrame:
    """The trials whose step rows are drawn: one per model and precision, with the B and the optimizer that most models share.

    Args:
        arms: Judged arms, a row each.

    Returns:
        A row for each trial.
    """
    trials = arms[arms["model"].isin(facets(arms))].drop_duplicates("trial")
    rank = trials.assign(
        of_size=trials["effective_batch"].map(trials.groupby("effective_batch")["model"].nunique()),
        of_optimizer=trials["optimizer"].map(trials.groupby("optimizer")["model"].nunique()),
    )
    best = rank.sort_values(["of_size", "of_optimizer", "optimizer", "seed", "trial"], ascending=[False, False, True, True, True])
    return in_order(best.drop_duplicates(["model", "precision"])).drop(columns=["of_size", "of_optimizer"])


def half_spread(arms: DataFrame) -> float:
    """Half the standard deviation of the full batch's held-out loss between seeds, the median over configurations.

    Args:
        arms: Judged arms, a row each.

    Returns:
        Nats per loss term; NaN for one seed.
    """
    trials = arms.drop_duplicates("trial").groupby("group")["full_held_out_loss"]
    return float(trials.std().median()) / 2


def convergence(arms: DataFrame, margin: float) -> DataFrame:
    """Compare losses at the end of training with the full batch's, paired by seed: L4.

    Args:
        arms: `Results.arms`.
        margin: Differences within ±margin count as equivalent.

    Returns:
        A row per configuration, arm and measure, of arm - full; NaN where n is too small. `mean`, `low`, `high`: Student t,
        95 %. `tost_p`: of |mean| < margin. `detectable`: the smallest difference that a paired t test would have found with
        80 % power. `apart`, `apart_p`: how many times farther the arm lies from the full batch and its permuted runs than
        those from each other, by a permutation test (`statistics.stands_apart`); `apart_holm`: its p after Holm over the
        accumulated arms of the measure.
    """
    arms = arms.query("arm in ['accumulated', 'permuted']")
    about = arms[[*CELL, "group", "trial"]]
    paired = pd.concat([about.assign(measure=name, off=arms[name] - arms[f"full_{name}"]) for name in MEASURES])
    paired["off"] = paired["off"].where(np.isfinite(paired["off"].astype(float)))
    null = paired.query("arm == 'permuted' and accumulation_steps == 1 and off.notna()")
    beside = null.groupby(["measure", "trial"])["off"].apply(list).to_dict()

    def compared(own: DataFrame) -> dict[str, Any]:
        own = own[own["off"].notna()]
        keys = own[["measure", "trial"]].itertuples(index=False, name=None)
        nulls = [beside.get(key, []) if arm == "accumulated" else [] for key, arm in zip(keys, own["arm"], strict=True)]
        apart, apart_p = statistics.stands_apart(own["off"].tolist(), nulls)
        return {**paired_comparison(own["off"].tolist(), margin), "apart": apart, "apart_p": apart_p}

    frame = cells(paired, [*CELL, "measure", "group"], compared).reindex(columns=[*CELL, *L4_COLUMNS])
    for _, own in frame.query("apart_p.notna() and arm == 'accumulated'").groupby("measure"):
        frame.loc[own.index, "apart_holm"] = statistics.holm(own["apart_p"].tolist())
    return in_order(frame)


L4_COLUMNS = ["measure", "n", "mean", "low", "high", "tost_p", "detectable", "apart", "apart_p", "apart_holm"]


def paired_comparison(differences: Sequence[float], margin: float) -> dict[str, Any]:
    """Compare paired runs: the effect, its 95 % Student t interval, and a test of equivalence.

    Args:
        differences: One for each pair (seed), arm - full batch.
        margin: Differences within ±margin count as equivalent.

    Returns:
        `n`; `mean`, `low` and `high`; `tost_p`, the larger p-value of two one-sided t tests; `detectable`, the smallest
        difference that n pairs could have shown.
    """
    interval = statistics.mean_interval(differences)
    return {
        "n": len(differences),
        "mean": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "tost_p": statistics.equivalence_p(differences, margin),
        "detectable": statistics.detectable(differences),
    }


def cells(rows: DataFrame, keys: Sequence[str], of: Callable[[DataFrame], Mapping[str, Any]]) -> DataFrame:
    """Summarise each group of rows in a row.

    Args:
        rows: Any table.
        keys: Columns; rows that have the same values in all of them are a group.
        of: Makes the columns of a group's row.

    Returns:
        A row for each group in the order of its keys: the keys, and what `of` gives.
    """
    return DataFrame([{**dict(zip(keys, key, strict=True)), **of(own)} for key, own in rows.groupby([*keys])])


def vacuity(arms: DataFrame) -> DataFrame:
    """How often what can reveal a fault occurred, per model: active clipping, short windows, unequal terms, float64 steps.

    Args:
        arms: Judged arms, a row each.

    Returns:
        A row for each workload and normalisation.
    """
    accumulated = arms.query("arm == 'accumulated'")
    table = accumulated.groupby(["workload", "norm"], as_index=False).agg(
        n=("trial", "nunique"),
        arms=("trial", "size"),
        clipped=("clipping_active", "sum"),
        short=("short_windows", lambda windows: int((windows > 0).sum())),
        unequal=("unequal_terms", "sum"),
        fewest_steps=("algebra_steps", "min"),
        floor=("algebra_floor", "max"),
    )
    return in_order(table)


def seconds(trials: DataFrame) -> Series[float]:
    """Sum of trial seconds by phase, then in total.

    Args:
        trials: Rows with columns `seconds_PHASE`.

    Returns:
        Seconds by phase.
    """
    phases = trials.filter(regex="^seconds_")
    sums = {str(name).removeprefix("seconds_"): math.fsum(own.dropna()) for name, own in phases.items()}
    return Series({**sums, "total": math.fsum(trials["seconds"])}, dtype=float)
