"""The verdicts of a sweep by cell, and the caveats that its arms earned: what the terminal, the page and the notebooks say."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from accumulation_harness.config.arm_name import ACCUMULATED, PERMUTED
from accumulation_harness.judge.cause import INHERENT, MEANINGS, Cause, parsed
from accumulation_harness.judge.verdict import Outcome
from accumulation_harness.results.judged_arm import VerdictRow

SEVERITY = (Outcome.equivalent, Outcome.inconclusive, Outcome.degraded, Outcome.different)  # of several trials, the last is told


@dataclass(frozen=True, kw_only=True)
class ArmCell(VerdictRow):
    """The trials (seeds, sizes) of one combination of settings at one N, summarised by the worst of them.

    `algebra_error` is the largest and `rounding_ratio` the median over the trials, or NaN.
    """

    agreeing: int  # trials with that verdict
    trials: int

    @property
    def name(self) -> tuple[str, str, str, str]:
        """The settings without N."""
        return self.workload, self.norm, self.optimizer, self.precision


def by_cell(rows: Iterable[VerdictRow]) -> list[ArmCell]:
    """Group rows of verdicts by settings and N.

    Args:
        rows: One row per arm and trial.

    Returns:
        One cell per combination, in the order in which the settings first occur, with N ascending.
    """
    groups: dict[tuple[object, ...], list[VerdictRow]] = defaultdict(list)
    for row in rows:
        groups[row.workload, row.norm, row.optimizer, row.precision, row.arm, row.accumulation_steps].append(row)
    cells = [_cell(group) for group in groups.values()]
    places = {name: place for place, name in enumerate(dict.fromkeys(cell.name for cell in cells))}
    return sorted(cells, key=lambda cell: (places[cell.name], cell.arm, cell.accumulation_steps))


def _cell(rows: Sequence[VerdictRow]) -> ArmCell:
    worst = max(rows, key=lambda row: (SEVERITY.index(Outcome(row.verdict)), not row.explained))
    ratios = [row.rounding_ratio for row in rows if not math.isnan(row.rounding_ratio)]
    errors = [row.algebra_error for row in rows if not math.isnan(row.algebra_error)]
    measured = {"algebra_error": max(errors, default=math.nan), "rounding_ratio": median(ratios) if ratios else math.nan}
    agreeing = sum(row.verdict == worst.verdict for row in rows)
    return ArmCell(**{**vars(worst), **measured}, agreeing=agreeing, trials=len(rows))


@dataclass(frozen=True)
class Caveat:
    """What a user has to know about some cells: in which settings, what was found, and what to do."""

    settings: dict[str, tuple[str, ...]]  # those of the cells, by name
    finding: str
    advice: str

    def __str__(self) -> str:
        where = ", ".join(f"{name}={'|'.join(values)}" for name, values in self.settings.items())
        return f"{where}: {self.finding} {self.advice}"


def caveats(cells: Sequence[ArmCell]) -> list[Caveat]:
    """Summarise the cells that are not equivalent.

    Args:
        cells: The cells of a sweep.

    Returns:
        One caveat for each pair of verdict and cause among the accumulated arms, the largest group first; none if all are
        equivalent.
    """
    groups: dict[tuple[str, str], list[ArmCell]] = defaultdict(list)
    for cell in cells:
        if cell.arm == ACCUMULATED and cell.verdict != Outcome.equivalent:
            groups[cell.verdict, cell.cause].append(cell)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    tasks = ("workload",) * (len({cell.workload for cell in cells}) > 1)
    return [_caveat(verdict, cause, group, (*tasks, "norm", "optimizer", "precision")) for (verdict, cause), group in ordered]


def _caveat(verdict: str, cause: str, cells: Sequence[ArmCell], names: Sequence[str]) -> Caveat:
    where = {name: tuple(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in names}
    size = spread([cell.algebra_error for cell in cells])
    ratio = spread([cell.rounding_ratio for cell in cells])
    if verdict == Outcome.degraded:
        found = f"accumulation is the same computation, with a rounding error {ratio} times the large batch's."
        known = " ".join(MEANINGS[one].remedy for one in parsed(cause))
        return Caveat(where, found, known or "Keep the accumulator in float32, or accumulate fewer micro-batches.")
    if verdict == Outcome.inconclusive:
        return Caveat(where, "it could not be judged.", "The report says why, and so does `reasons` in trial.json.")
    causes = parsed(cause) or (Cause.unexplained,)
    whose = " This is a property of the model, not a fault of the loop." if INHERENT.issuperset(causes) else ""
    found = (
        f"accumulation is a different computation: the gradients differ by {size} of the large batch's gradient norm "
        f"({', '.join(causes)}).{whose}"
    )
    return Caveat(where, found, " ".join(MEANINGS[one].remedy for one in causes))


def control_failed(cells: Sequence[ArmCell]) -> list[ArmCell]:
    """Return the controls (large batches with shuffled rows) that are not equivalent, except where random layers explain it.

    Args:
        cells: The cells of a sweep.

    Returns:
        The controls that failed.
    """
    return [
        cell
        for cell in cells
        if cell.arm == PERMUTED and cell.verdict == Outcome.different and Cause.stochastic_layers not in parsed(cell.cause)
    ]


def spread(values: Iterable[float]) -> str:
    """Format the range of some numbers with two digits, or as one number if both ends read the same.

    >>> spread([0.121, 0.6]), spread([4.0, 4.0]), spread([2.5, 168.2]), spread([])
    ('0.12 to 0.6', '4', '2.5 to 168', 'an unknown part')

    Args:
        values: The numbers; NaN is left out.

    Returns:
        The text.
    """
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "an unknown part"
    low, high = (f"{value:.0f}" if 100 <= abs(value) < 1e4 else f"{value:.2g}" for value in (min(known), max(known)))
    return low if low == high else f"{low} to {high}"
