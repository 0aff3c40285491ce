"""Arms that are wrong on purpose: which were found, which were named, and from when on the loss curve shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame, Series

from accumulation_harness.analysis import load
from accumulation_harness.judge.cause import JOINT, Cause
from accumulation_harness.judge.gates import ALGEBRA_GATE, TRAJECTORY_GATE
from accumulation_harness.judge.verdict import Rounding, rounding_failures
from accumulation_harness.results.record import in_one_line
from accumulation_harness.results.store import State

# The columns of `faults.csv`, in their order.
COLUMNS = ("fault", "optimizer", "norm", "precision", "clipping", "lengths", "detected", "cause_named",
           "steps_until_visible_in_loss")  # fmt: skip
VISIBLE = 0.05  # of the correct arm's loss: a difference that a reader of a loss curve would notice
IN_A_ROW = 3  # steps: a single one may be due to its window
CLIPPINGS = ("off", "sometimes", "always")
# The checks behind a verdict; the keys are columns of `by_check`.
CHECKS = {
    "gradient": "gradients",
    "state": "optimizer state",
    "reported": "reported loss",
    "trajectory": "parameters",
    "counted": "counters",
    "rounding": "rounding",
}
Losses = NDArray[np.float64]
_PAIR = ["experiment", "trial", "accumulation_steps"]


def planted(arms: DataFrame) -> Series[bool]:
    """Tell arms with a planted error of a chosen size (`scale@1e-6`) from those with a fault of the catalogue.

    Args:
        arms: `Results.arms`.

    Returns:
        True for each arm with a planted error, in the rows' order.
    """
    return arms["fault"] & arms["arm"].str.contains("@", regex=False)


def judged(arms: DataFrame) -> DataFrame:
    """Put each fault arm beside the correct arm of its trial and N.

    Args:
        arms: `Results.arms`, with fault arms and the correct ones.

    Returns:
        The fault arms, with these columns besides. `detected`: judged `different` or `degraded`, and differently from the
        correct arm, in its verdict or in the set of its causes (BatchNorm is the correct arm's own cause); an arm that could
        not be judged is not. `named`: detected, and the fault is among the causes. `wrong`: causes that are neither the
        fault's nor the correct arm's. `confidently_wrong`: detected, with such a cause and no `unexplained` beside it.
        `clipping`, `lengths`: of the trial, from the correct arm.
    """
    correct = arms.query("arm == 'accumulated'")
    beside = correct[[*_PAIR, "verdict", "cause", "clipped_share", "short_windows"]]
    rows = arms[arms["fault"]].merge(beside, on=_PAIR, suffixes=("", "_correct"), validate="many_to_one")
    causes, own = (rows[name].map(causes_of) for name in ("cause", "cause_correct"))
    unknown = frozenset({Cause.unexplained})
    wrong = [c - cc - {fault} - unknown for fault, c, cc in zip(rows["arm"], causes, own, strict=True)]
    told = Series([fault in c for fault, c in zip(rows["arm"], causes, strict=True)], rows.index, dtype=bool)
    sure = Series([bool(w) and not c & unknown for c, w in zip(causes, wrong, strict=True)], rows.index, dtype=bool)
    detected = rows["verdict"].isin(["different", "degraded"]) & ((rows["verdict"] != rows["verdict_correct"]) | (causes != own))
    return rows.assign(
        detected=detected,
        named=detected & told,
        confidently_wrong=detected & sure,
        wrong=Series(["+".join(sorted(w)) for w in wrong], rows.index, dtype=object),
        clipping=rows["clipped_share_correct"].map(clipping),
        lengths=[lengths(*pair) for pair in zip(rows["ragged"], rows["short_windows_correct"], strict=True)],
    )


def catalogue(arms: DataFrame) -> DataFrame:
    """`judged` of the catalogue's faults, without planted errors.

    Args:
        arms: `Results.arms`, with fault arms and the correct ones.

    Returns:
        The columns of `judged`, a row for each fault arm.
    """
    rows = judged(arms)
    return rows[~planted(rows)].reset_index(drop=True)


def causes_of(cause: str) -> frozenset[str]:
    """Split the column `cause` of an arm.

    Args:
        cause: Names joined by `JOINT`; empty where there is no cause.

    Returns:
        The names, without their order.
    """
    return frozenset(cause.split(JOINT)) - {""}


def clipping(share: float) -> str:
    """The word for the share of the windows that were clipped, as in CLIPPINGS.

    Args:
        share: A share from 0 to 1.

    Returns:
        `always`, `sometimes` or `off`.
    """
    return "always" if share == 1 else "sometimes" if share > 0 else "off"


def lengths(ragged: bool, short_windows: int) -> str:
    """Whether micro-batches were of equal length, and whether there were windows shorter than B.

    Args:
        ragged: Whether micro-batches differ in length.
        short_windows: How many windows are shorter than B.

    Returns:
        `equal` or `ragged`, with `+remainder` where windows were short.
    """
    return ("ragged" if ragged else "equal") + ("+remainder" if short_windows else "")


def first_visible(losses: Sequence[float] | Losses, correct: Sequence[float] | Losses) -> float:
    """Find the optimizer step from which a loss visibly differs.

    It differs where it is more than VISIBLE of the correct arm's loss away from it, or not finite, at IN_A_ROW steps in a
    row.

    Args:
        losses: The arm's loss at each step.
        correct: The correct arm's loss at each step.

    Returns:
        The step, from 0; infinite if there is none.
    """
    loss, right = np.asarray(losses, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    assert loss.shape == right.shape
    with np.errstate(invalid="ignore"):
        apart = ~(np.abs(loss - right) <= VISIBLE * np.abs(right))
    if len(apart) < IN_A_ROW:
        return math.inf
    starts = np.flatnonzero(np.lib.stride_tricks.sliding_window_view(apart, IN_A_ROW).all(axis=1))
    return float(starts[0]) if len(starts) else math.inf


def _visibility(steps: DataFrame) -> DataFrame:
    """`visible_at` of every accumulated arm, by trial, arm and N: `first_visible` beside the correct arm of the same N."""
    rows = []
    chosen = steps.query("replicate == 0").sort_values("step", kind="stable")
    for (trial, n), own in chosen.groupby(["trial", "accumulation_steps"]):
        curves = {str(arm): losses.to_numpy(dtype=np.float64) for arm, losses in own.groupby("arm")["loss"]}
        correct = curves.pop("accumulated", None)
        if correct is not None:
            rows += [(trial, arm, n, first_visible(losses, correct)) for arm, losses in curves.items()]
    return DataFrame(rows, columns=["trial", "arm", "accumulation_steps", "visible_at"])


def with_visibility(results: Path, loaded: load.Results) -> load.Results:
    """Add to arms the step from which the loss curve shows their fault.

    What a trial's verdicts say stands without its step rows; its loss curves are in no number.

    Args:
        results: The folder of the store.
        loaded: What was read of it.

    Returns:
        Results whose arms have `visible_at`; infinite: never visible; NaN: no fault of the catalogue, or no readable step
        rows.
    """
    arms = loaded.arms
    asked = arms[arms["fault"] & ~planted(arms)]
    frames: list[DataFrame] = []
    torn = {(one.experiment, one.trial): one for one in loaded.torn}
    for experiment, trial in asked[["experiment", "trial"]].drop_duplicates().itertuples(index=False):
        if (experiment, trial) in torn:
            continue
        rows, unread = load.steps(results, experiment, [trial])
        if unread:
            torn[experiment, trial] = unread[0]
            continue
        try:
            frames.append(_visibility(rows).assign(experiment=experiment))
        except (KeyError, TypeError, ValueError, AssertionError) as error:  # not written by this engine
            detail = in_one_line(f"steps.parquet: {type(error).__name__}: {error}")
            torn[experiment, trial] = load.Missing(experiment, trial, str(State.damaged), detail)
    if frames:
        arms = arms.merge(pd.concat(frames, ignore_index=True), on=[*_PAIR, "arm"], how="left", validate="one_to_one")
    else:
        arms = arms.assign(visible_at=math.nan)
    return replace(loaded, arms=arms, torn=tuple(torn.values()))


def shown(arms: DataFrame) -> Series[bool]:
    """Decide whether the loss curve of an arm shows its fault.

    Args:
        arms: `judged` arms with `visible_at`: the step from which the curve leaves the control's band, infinite where it
            never does.

    Returns:
        A truth value for each arm whose curve is known.
    """
    return arms["visible_at"].dropna() < math.inf


def to_table(arms: DataFrame) -> DataFrame:
    """`faults.csv`: a row per fault of the catalogue, N and trial whose computation it changes, sorted by its columns.

    Args:
        arms: Judged arms, a row each.

    Returns:
        Columns as in `faults.csv`.
    """
    rows = catalogue(arms)
    rows = rows[rows["changes"]]
    table = rows.assign(fault=rows["arm"], cause_named=rows["named"], steps_until_visible_in_loss=rows["visible_at"].map(_steps))
    return table.sort_values([*COLUMNS[:6], "experiment", "trial", "accumulation_steps"], kind="stable")[list(COLUMNS)]


def _steps(visible_at: float) -> str:
    """Of `visible_at`; empty: never."""
    return "unknown" if math.isnan(visible_at) else "" if math.isinf(visible_at) else f"{visible_at:.0f}"


def by_check(arms: DataFrame) -> DataFrame:
    """Decide which checks reject each arm.

    Args:
        arms: `Results.arms`.

    Returns:
        A row for each arm and a column of truth values for each check: gradient, state, reported loss and trajectory against
        their gates, counters, rounding.
    """
    return DataFrame(
        {
            "gradient": arms["gradient_error"] > ALGEBRA_GATE,
            "state": arms["state_error"] > ALGEBRA_GATE,
            "reported": arms["loss_error"] > ALGEBRA_GATE,
            "trajectory": arms["trajectory_error"] > TRAJECTORY_GATE,
            "counted": arms["counters"] != "",
            "rounding": _rounding_fails(arms),
        }
    )


def _rounding_fails(arms: DataFrame) -> Series[bool]:
    """Whether L1 rejects each of these arms."""
    columns = ("precision", "rounding_ratio", "rounding_high", "full_error")
    rows = zip(*(arms[name] for name in columns), arms["scale"] * arms["cosine"], strict=True)
    rejected = [
        bool(rounding_failures(precision, Rounding(ratio=ratio, high=high, full_error=error, scale=factor, cosine=1.0)))
        for precision, ratio, high, error, factor in rows
    ]
    return Series(rejected, index=arms.index, dtype=bool)
