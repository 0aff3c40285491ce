"""Is accumulating wasteful on one device? A step after every micro-batch of b beside one after N of them (arXiv 2507.07101)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pandas import DataFrame

from accumulation_harness.analysis.answering import spread, statistics
from accumulation_harness.experiments.convergence.trainings import MARGIN, NAMES, OWN_RATE, SETTING, reach, targets
from accumulation_harness.experiments.shared.tuning import FEWEST_SEEDS, LEVEL, Contrast, contrasts

COSTS = ("samples", "optimizer_steps", "seconds")


class Wasteful(StrEnum):
    """Whether nothing is gained by waiting for N micro-batches before a step."""

    yes = "yes"
    no = "no"
    undecided = "undecided"


@dataclass(frozen=True)
class Instead:
    """Small batches of b less N accumulated micro-batches of b, on the same samples, each at its own rate; judging seeds."""

    small: Contrast  # of the test loss, and of the logs of what it took to the last target, where both came there
    full_seconds: list[float]  # the same of the full batch

    @property
    def setting(self) -> tuple[Any, ...]:
        """Without N and the kind of small batch."""
        return self.small.key[: len(SETTING)]

    @property
    def name(self) -> str:
        """The small batch in words."""
        *_, num, arm = self.small.key
        size = self.small.rows["step_samples"].iloc[0]
        return f"{NAMES[arm].replace('batch', f'batch of {size:g}')}, N = {num}"

    def verdict(self, level: float = 1 - LEVEL) -> Wasteful:
        """`yes`: fewer seconds, and a loss that is no worse by the margin; `no`: more seconds, or worse by the margin."""
        if not self.small.is_usable:
            return Wasteful.undecided
        loss, seconds = (self.small.interval(level, value) for value in ("test_loss", "seconds"))
        all_arrive = len(self.small.of("seconds")) == len(self.small.of())
        if loss.low > MARGIN or (all_arrive and seconds.low > 0):
            return Wasteful.no
        return Wasteful.yes if all_arrive and loss.high < MARGIN and seconds.high < 0 else Wasteful.undecided


def instead_of_accumulating(rows: DataFrame, judged: DataFrame) -> list[Instead]:
    """One per setting, N and kind of small batch, from `convergence.trainings` and of these `convergence.judged`.

    Args:
        rows: From `trainings`.
        judged: From `judged` of these.

    Returns:
        The comparisons.
    """
    levels = targets(rows)
    last = [levels[key][-1] for key in judged[[*SETTING]].itertuples(index=False, name=None)]
    for cost in COSTS:
        curves = zip(judged[f"curve_{cost}"], judged["curve_probe_loss"], last, strict=True)
        judged = judged.assign(**{cost: [_log(reach(*curve)) for curve in curves]})
    plain = judged.query("arm == 'accumulated'")
    by_n = [*SETTING, "accumulation_steps"]
    full = {one.key: one for one in contrasts(plain, judged.query("arm == 'full'"), SETTING, ["seconds"], by_n[-1:])}
    small = contrasts(judged[judged["arm"].isin(OWN_RATE)], plain, by_n, ["test_loss", *COSTS], ["arm"])
    return [Instead(one, [-off for off in full[one.key[:-1]].of("seconds")]) for one in small if one.key[:-1] in full]


def _log(cost: float) -> float:
    """NaN where the target was not reached, or cost nothing."""
    return math.log(cost) if 0 < cost < math.inf else math.nan


def verdicts(found: Sequence[Instead]) -> list[Wasteful]:
    """Judge each comparison, with Bonferroni intervals over all that have enough seeds.

    Args:
        found: From `instead_of_accumulating`.

    Returns:
        One for each.
    """
    judged = sum(len(one.small.of()) >= FEWEST_SEEDS for one in found)
    return [one.verdict(1 - LEVEL / max(1, judged)) for one in found]


def counted(said: Sequence[Wasteful]) -> str:
    """How many comparisons say what.

    Args:
        said: From `verdicts`.

    Returns:
        A sentence.
    """
    yes, no, undecided = (sum(one == verdict for one in said) for verdict in Wasteful)
    return f"Of {len(said)} comparisons accumulating is wasteful in {yes}, not wasteful in {no}, undecided in {undecided}."


def advice(found: Sequence[Instead], said: Sequence[Wasteful]) -> str:
    """Advise from the comparisons that decide; where they disagree, say so.

    Args:
        found: From `instead_of_accumulating`.
        said: From `verdicts` of these.

    Returns:
        A sentence.
    """
    whole = [math.exp(statistics.mean_interval(one.full_seconds).estimate) for one in found if one.full_seconds]
    fill = f"fill the device first: where all of B fits, it takes {spread(whole)} times accumulation's seconds; then "
    match Wasteful.yes in said, Wasteful.no in said:
        case True, False:
            step = (
                "step after every micro-batch, and tune the learning rate again. Accumulate where the large batch itself is "
                "wanted: a recipe to be kept, several devices, a loss or a layer that couples the samples."
            )
        case False, True:
            step = "accumulate: smaller batches take longer here, or end worse."
        case True, True:
            step = (
                "try small steps and accumulation, each at its own learning rate: which is better depends on the model, on b and "
                "on the optimizer's memory."
            )
        case _:
            step = "whether to step after every micro-batch is not decided here."
    return (fill if min(whole, default=1.0) < 1 else "") + step


def times(logs: Sequence[float]) -> str:
    """Write ratios in words: the geometric mean with its 95 % interval.

    Args:
        logs: One for each seed.

    Returns:
        `RATIO (LOW to HIGH)`.
    """
    if not logs:
        return "-"
    one = statistics.mean_interval(logs)
    middle = f"{math.exp(one.estimate):.2f}"
    return middle if math.isnan(one.low) else f"{middle} ({math.exp(one.low):.2f} to {math.exp(one.high):.2f})"
