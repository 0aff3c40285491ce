"""Learning curves: tuned rates, samples, steps and seconds to a target, area, plateau; from measurements to numbers and tables.

Seeds from 100 on choose the learning rates, by validation loss; the others judge, by test loss. No trial does both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from pandas import DataFrame

from accumulation_harness.analysis.answering import Results
from accumulation_harness.config import TUNING_SEEDS
from accumulation_harness.experiments.shared.tuning import Contrast, best_rates, contrasts, longest
from accumulation_harness.judge.paired import Paired, corrected, half_spread

FRACTIONS = (0.5, 0.8, 0.95)  # of the way from the loss at the start to where the full batch ends on the tuning seeds
FLAT = 0.01  # relative change of the probe loss over the last fifth, of a training at its plateau
MARGIN = 0.02  # nats of test loss: 2 % in likelihood
SETTING = ("workload", "norm", "optimizer", "effective_batch")
ARM = ("arm", "accumulation_steps")
NAMES = {
    "full": "full batch",
    "accumulated": "accumulated",
    "permuted": "full batch, rows shuffled (control)",
    "small_batch": "small batch",
    "small_batch_memory": "small batch, memory matched",
}
OWN_RATE = ("small_batch", "small_batch_memory")  # the others compute what the full batch does, and have its rate


def trainings(results: Results) -> DataFrame:
    """List every arm of every trial once; a loss that is not finite becomes infinite, so that its rate is never the best.

    Args:
        results: What a store holds.

    Returns:
        The rows.
    """
    rows = longest(results.study("learning_curves", ["recalibrated_test_loss"]), SETTING)
    rows = rows.drop_duplicates([*SETTING, *ARM, "seed", "lr"])  # trained alone, and beside others
    return rows.assign(validation_loss=rows["curve_validation_loss"].str[-1].astype(float).fillna(math.inf))


def arm_name(arm: object, num: object) -> str:
    """An arm as the page calls it.

    Args:
        arm: Name of an arm.
        num: N.

    Returns:
        A phrase.
    """
    return f"{NAMES.get(str(arm), str(arm))}{f', N = {num}' if int(str(num)) > 1 else ''}"


# Of one curve ------------------------------------------------------------------------------------------------------------------


def reach(cost: Sequence[float], loss: Sequence[float], target: float) -> float:
    """The cost at which the loss first is `target` or less, linear between points; infinite where it never is.

    Args:
        cost: Along the training, rising.
        loss: At these costs.
        target: A loss.

    Returns:
        The cost.
    """
    i = next((i for i, value in enumerate(loss) if value <= target), None)
    if i is None:
        return math.inf
    share = (loss[i - 1] - target) / (loss[i - 1] - loss[i]) if i and math.isfinite(loss[i - 1]) else 1.0
    return cost[i - 1] + share * (cost[i] - cost[i - 1]) if share < 1 else cost[i]


def drift(loss: Sequence[float]) -> float:
    """Relative change of the loss within the last fifth: mean of its second half over the mean of its first, less 1.

    Args:
        loss: Along the training.

    Returns:
        Below 0 while it falls.
    """
    fifth = np.asarray(loss[-max(2, len(loss) // 5) :], dtype=float)
    half = len(fifth) // 2
    return float(fifth[-half:].mean() / fifth[:half].mean() - 1)


def roughness(loss: Sequence[float]) -> float:
    """Measure how rough a curve is, blind to any steady decay.

    sqrt(mean of squared second differences of log loss / 6), from a tenth of the training on. Of white noise it is the
    standard deviation.

    Args:
        loss: Positive losses, evenly spaced.

    Returns:
        The roughness, in units of log loss.
    """
    bends = np.diff(np.log(loss[len(loss) // 10 :]), 2)
    return float(np.sqrt(np.mean(bends**2) / 6))


# Of many trials ----------------------------------------------------------------------------------------------------------------


def tuned(rows: DataFrame) -> DataFrame:
    """Choose learning rates by the lowest mean validation loss over the tuning seeds.

    A rate that is not `interior`, but at an end of the grid, is the best of those tried, and perhaps of no others.

    Args:
        rows: Those of the study `learning_curves`.

    Returns:
        One row per setting and arm that has a rate of its own: `lr`, `interior`.
    """
    best = best_rates(_choosing(rows).query("arm == 'full' or arm in @OWN_RATE"), [*SETTING, *ARM])
    given = rows.groupby(list(SETTING))["lr"].nunique().eq(1).rename("given")  # nothing was tried beside it
    best = best.merge(given.reset_index(), on=list(SETTING))
    return best.assign(interior=best["interior"] | best.pop("given"))


def _choosing(rows: DataFrame) -> DataFrame:
    """The rows of the tuning seeds, and all of a setting that has a single rate, which nothing had to choose."""
    settings = rows.groupby(list(SETTING))
    is_given = settings["lr"].transform("nunique").eq(1) & settings["seed"].transform("max").lt(TUNING_SEEDS)
    return rows[is_given | rows["seed"].ge(TUNING_SEEDS)]


def judged(rows: DataFrame) -> DataFrame:
    """The trainings of the judging seeds, each arm at its tuned rate, with `interior` of that rate.

    Args:
        rows: From `trainings`.

    Returns:
        The rows.
    """
    best = tuned(rows)
    of_full = best.query("arm == 'full'").drop(columns=list(ARM))
    own = rows.query(f"seed < {TUNING_SEEDS}")
    chooses, at = own["arm"].isin(OWN_RATE), [*SETTING, "lr"]
    merged = pd.concat([own[chooses].merge(best, on=[*at, *ARM]), own[~chooses].merge(of_full, on=at)])
    return merged.sort_values([*SETTING, *ARM, "seed"], ignore_index=True)


def targets(rows: DataFrame) -> dict[tuple[object, ...], tuple[float, ...]]:
    """Three probe losses by setting, from the full batch on the tuning seeds at its best rate; none from the seeds that judge.

    Args:
        rows: From `trainings`.

    Returns:
        Setting -> three losses, falling.
    """
    best = tuned(rows)
    full = best.query("arm == 'full'").merge(_choosing(rows), on=[*SETTING, *ARM, "lr"])
    found = {}
    for key, own in full.groupby(list(SETTING)):
        start, end = (np.mean([curve[at] for curve in own["curve_probe_loss"]]) for at in (0, -1))
        found[tuple(key)] = tuple(start - fraction * (start - end) for fraction in FRACTIONS)
    return found


def reaches(rows: DataFrame, target: float, cost: str) -> list[float]:
    """What each training took to the target; `cost` is samples, optimizer_steps or seconds.

    Args:
        rows: From `trainings`.
        target: A probe loss.
        cost: `samples`, `optimizer_steps` or `seconds`.

    Returns:
        One for each row, infinite where the target was not reached.
    """
    return [reach(*pair, target) for pair in zip(rows[f"curve_{cost}"], rows["curve_probe_loss"], strict=True)]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """An arm's test loss less the full batch's, paired by seed: nats per loss term."""

    key: tuple[object, ...]  # setting and arm
    pairs: Paired
    is_usable: bool  # enough seeds, both rates inside the grid
    spread: float  # standard deviation of the differences over that of the null's; NaN where the null has none


def beside_full(rows: DataFrame) -> list[Beside]:
    """Compare every arm's test loss with the full batch's of its setting, Holm-corrected over all.

    Args:
        rows: From `judged`.

    Returns:
        One for each arm.
    """
    full = rows.query("arm == 'full'")
    found = contrasts(rows.query("arm != 'full'"), full, SETTING, ["test_loss"], ARM)
    bands = {one.key[:-2]: np.std(one.of(), ddof=1) for one in found if one.key[-2] == "permuted" and len(one.rows) > 1}
    spreads = {key: half_spread(own["test_loss"].tolist()) for key, own in full.groupby(list(SETTING))}
    pairs = corrected([Paired(differences=tuple(one.of()), margin_at=spreads[one.key[:-2]]) for one in found])
    return [
        Beside(key=one.key, pairs=own, is_usable=one.is_usable,
               spread=float(np.std(one.of(), ddof=1) / band) if len(one.rows) > 1 and band > 0 else math.nan)
        for one, own in zip(found, pairs, strict=True) for band in [bands.get(one.key[:-2], 0.0)]
    ]  # fmt: skip


def pairs(rows: DataFrame) -> list[Contrast]:
    """The full batch less the smallest small batch of each setting, at equal samples; of rows from `judged`.

    Args:
        rows: From `judged`.

    Returns:
        One for each setting.
    """
    rows = rows.assign(
        log_roughness=rows["curve_probe_loss"].map(roughness).map(math.log), drift=rows["curve_validation_loss"].map(drift)
    )
    full, small = (rows.query("arm == @arm") for arm in ("full", "small_batch"))
    most = small.groupby(list(SETTING))["accumulation_steps"].transform("max")
    found = contrasts(full, small[small["accumulation_steps"] == most], SETTING, ["test_loss", "log_roughness", "gap"])
    return [one for one in found if one.is_usable]
