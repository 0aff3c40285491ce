"""Is accumulating wasteful on one device? A step after every micro-batch of b beside one after N of them (arXiv 2507.07101)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pandas import DataFrame

from accumulation_harness.analysis.answering import spread, statistics
from accumulation_harness.experiments.convergence.trainings import ARM, MARGIN, NAMES, OWN_RATE, SETTING, reaches, targets
from accumulation_harness.experiments.shared.tuning import FEWEST_SEEDS, LEVEL

COSTS = ("samples", "optimizer_steps", "seconds")


class Wasteful(StrEnum):
    """Whether nothing is gained by waiting for N micro-batches before a step."""

    yes = "yes"
    no = "no"
    undecided = "undecided"


@dataclass(frozen=True, kw_only=True)
class Instead:
    """Small batches of b beside N accumulated micro-batches of b, on the same samples, each at its own rate; judging seeds."""

    setting: tuple[object, ...]
    arm: str
    num: int  # N
    batch: float  # b
    loss: tuple[float, ...]  # test loss less accumulation's, paired by seed
    costs: dict[str, tuple[float, ...]]  # log of what it took to the last target over accumulation's, where both came there
    full_seconds: tuple[float, ...]  # the same of the full batch
    interior: bool  # whether both rates lie inside the grid

    @property
    def name(self) -> str:
        """The small batch in words."""
        return f"{NAMES[self.arm].replace('batch', f'batch of {self.batch:g}')}, N = {self.num}"

    def verdict(self, level: float = 1 - LEVEL) -> Wasteful:
        """`yes`: fewer seconds, and a loss that is no worse by the margin; `no`: more seconds, or worse by the margin."""
        if not self.interior or len(self.loss) < FEWEST_SEEDS:
            return Wasteful.undecided
        loss, seconds = (statistics.mean_interval(values, level=level) for values in (self.loss, self.costs["seconds"]))
        all_arrive = len(self.costs["seconds"]) == len(self.loss)
        if loss.low > MARGIN or (all_arrive and seconds.low > 0):
            return Wasteful.no
        return Wasteful.yes if all_arrive and loss.high < MARGIN and seconds.high < 0 else Wasteful.undecided


def instead_of_accumulating(rows: DataFrame, judged: DataFrame) -> list[Instead]:
    """One per setting, N and kind of small batch, from `convergence.trainings` and of these `convergence.judged`."""
    found, levels = [], targets(rows)
    for key, own in judged.groupby(list(SETTING)):
        level = levels[tuple(key)][-1]
        arms = {arm: one.set_index("seed") for arm, one in own.groupby(list(ARM))}
        for (arm, num), small in arms.items():
            plain, full = arms.get(("accumulated", num)), arms.get(("full", 1))
            if arm not in OWN_RATE or plain is None or full is None:
                continue
            found.append(Instead(
                setting=tuple(key), arm=str(arm), num=int(str(num)), batch=float(small["step_samples"].iloc[0]),
                loss=tuple((small["test_loss"] - plain["test_loss"]).dropna().astype(float)),
                costs={cost: _logs(small, plain, level, cost) for cost in COSTS},
                full_seconds=_logs(full, plain, level, "seconds"),
                interior=bool(small["interior"].all() and plain["interior"].all()),
            ))  # fmt: skip
    return found


def verdicts(found: Sequence[Instead]) -> list[Wasteful]:
    """Of each, with intervals by Bonferroni over all that have enough seeds."""
    judged = sum(len(one.loss) >= FEWEST_SEEDS for one in found)
    return [one.verdict(1 - LEVEL / max(1, judged)) for one in found]


def counted(said: Sequence[Wasteful]) -> str:
    """How many comparisons say what."""
    yes, no, undecided = (sum(one == verdict for one in said) for verdict in Wasteful)
    return f"Of {len(said)} comparisons accumulating is wasteful in {yes}, not wasteful in {no}, undecided in {undecided}."


def advice(found: Sequence[Instead], said: Sequence[Wasteful]) -> str:
    """From the comparisons that decide, and where they disagree only that they do."""
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
    """Of logarithms of ratios: the geometric mean and its 95 % interval, in words."""
    if not logs:
        return "-"
    one = statistics.mean_interval(logs)
    middle = f"{math.exp(one.estimate):.2f}"
    return middle if math.isnan(one.low) else f"{middle} ({math.exp(one.low):.2f} to {math.exp(one.high):.2f})"


def _logs(arm: DataFrame, plain: DataFrame, level: float, cost: str) -> tuple[float, ...]:
    both = arm.index.intersection(plain.index)
    pairs = zip(*(reaches(rows.loc[both], level, cost) for rows in (arm, plain)), strict=True)
    return tuple(math.log(a.value / b.value) for a, b in pairs if a.reached and b.reached and a.value and b.value)
