"""What trainings paired by seed say of each other, in lines: where they end beside the large batch, and how they came there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from accumulation_harness.config import ConfigError
from accumulation_harness.config.arm_name import ACCUMULATED, FULL, PERMUTED, ArmName, arm_of
from accumulation_harness.converge import curve
from accumulation_harness.judge import paired
from accumulation_harness.judge.paired import Margin, Paired
from accumulation_harness.results.record import read_trial
from accumulation_harness.system.terminal import in_columns

OWN = ("seeds", "margin", "metric")
LOOKS = 2  # that share the level of a test: at the seeds that are asked for first, and at those that would decide
SMALL, MATCHED = "small_batch", "small_batch_memory"
NAMES = {
    FULL: "large batch",
    ACCUMULATED: "accumulated",
    PERMUTED: "large batch, rows shuffled (control)",
    SMALL: "small batch",
    MATCHED: "small batch, half-lives matched",
}
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says beside the settings of the trainings."""

    seeds: int = 5
    margin: float | None = None
    metric: str = "loss"

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        """From texts; ConfigError about what is none of these."""
        values: dict[str, Any] = dict(given)
        for name, kind, expected in (("seeds", int, "a number from 2 on"), ("margin", float, "a difference above 0")):
            if name in values:
                try:
                    values[name] = kind(values[name])
                except ValueError:
                    raise ConfigError(name, given[name], expected) from None
                if not (values[name] >= 2 if name == "seeds" else 0 < values[name] < math.inf):
                    raise ConfigError(name, given[name], expected)
        return cls(**values)


def lines(folders: Sequence[Path], asked: Asked) -> Iterator[str]:
    """Say what trainings, paired by seed, say of each other.

    Args:
        folders: Those of finished trials.
        asked: The metric and the margin.

    Yields:
        The lines of the table, what follows from it, and the curves.
    """
    arms: dict[ArmName, dict[int, Row]] = {}
    for folder in folders:
        trial = read_trial(folder)
        for row in trial.record["measurements"]:
            arms.setdefault(arm_of(row), {})[trial.config["seed"]] = row
    if not arms:
        return
    for arm in [arm for arm in arms if arm.name == MATCHED]:  # the same training, where the optimizer has no half-life
        if _curves(arms[arm]) == _curves(arms[dataclasses.replace(arm, name=SMALL)]):
            del arms[arm]
    values = {arm: {seed: measured(row, asked.metric) for seed, row in rows.items()} for arm, rows in arms.items()}
    control = [*values[ArmName(PERMUTED)].values()]
    margin = (lambda seeds: asked.margin) if asked.margin is not None else paired.half_spread(control)
    found = beside(values, margin)
    yield from _told(arms, values, found, asked)
    largest = max(arm.accumulation_steps for arm in arms)
    drawn = {_name(arm): [*rows.values()] for arm, rows in arms.items() if arm.accumulation_steps in (1, largest)}
    yield "loss on training samples:"
    yield from curve.lines({f"{letter}: {name}": rows for letter, (name, rows) in zip("Lcasm", drawn.items(), strict=False)})


def measured(row: Row, metric: str) -> float:
    """Read the value of a metric.

    Args:
        row: Where a training ended.
        metric: `loss`, `accuracy`, or a metric of the task's.

    Returns:
        On the held-out samples.

    Raises:
        ConfigError: The training has none of that name.
    """
    known = {name.removeprefix("test_"): value for name, value in row.items() if name.startswith("test_")}
    if math.isnan(known["accuracy"]):  # nobody says what is correct
        del known["accuracy"]
    if metric not in known:
        raise ConfigError("metric", metric, f"one of {', '.join(known)}")
    return float(known[metric])


def beside(values: Mapping[ArmName, Mapping[int, float]], margin: Margin) -> dict[ArmName, Paired]:
    """Compare every training with the large batch, paired by seed; the tests of no difference are corrected over all (Holm).

    Args:
        values: Arm -> seed -> value.
        margin: What counts as no difference.

    Returns:
        Arm -> comparison.
    """
    full = values[ArmName(FULL)]
    others = [arm for arm in values if arm.name != FULL]
    found = [
        Paired(
            differences=tuple(value - full[seed] for seed, value in values[arm].items()),
            margin_at=margin,
            level=paired.LEVEL / LOOKS,
        )
        for arm in others
    ]
    return dict(zip(others, paired.corrected(found), strict=True))


def _told(
    arms: Mapping[ArmName, Mapping[int, Row]],
    values: Mapping[ArmName, Mapping[int, float]],
    found: Mapping[ArmName, Paired],
    asked: Asked,
) -> Iterator[str]:
    full = ArmName(FULL)
    one = next(iter(found.values()))
    samples = next(iter(arms[full].values()))["samples"]
    source = (
        ""
        if asked.margin is not None
        else " (half of the standard deviation of the control over seeds; of that, the lower 95% limit)"
    )
    yield f"{asked.metric} on the held-out samples after {samples:,} samples; mean of {len(values[full])} seeds, paired by seed"
    yield f"counts as the same: a difference of up to {one.margin:.3g}{source}"
    head = (
        asked.metric,
        f"difference from the large batch ({1 - one.level:.1%} interval)",
        "verdict",
        "detectable",
        "seeds to decide",
    )
    table: list[tuple[str, ...]] = [("training", "rate", *head)]
    for arm, own in values.items():
        rate = next(iter(arms[arm].values()))["rate"]
        mean = math.fsum(own.values()) / len(own)
        table.append((_name(arm), f"{rate:.3g}", f"{mean:.4g}", *(_cells(found[arm]) if arm in found else ("",) * 4)))
    yield from in_columns(table)
    yield "detectable: the smallest difference that as many seeds as these find in 80 of 100 cases"
    yield "seeds to decide: so many find, in 80 of 100 cases, a difference that no longer counts as the same"
    if found[ArmName(PERMUTED)].verdict in (paired.Comparison.below, paired.Comparison.above):
        yield "! The control differs from the large batch, although it is the same training: trust no other row of this table."
    if any(arm.name == SMALL for arm in values):
        yield "The learning rate of small batches follows a rule (rate / N; with Adam rate / sqrt(N)); it was not tuned."


def _cells(one: Paired) -> tuple[str, ...]:
    if diverged := sum(not math.isfinite(value) for value in one.differences):
        return "", f"not finite in {diverged} of {len(one.differences)}", "", ""
    around, needed = one.interval, one.deciding_seeds
    decided = one.verdict != paired.Comparison.undecided
    span = f"{around.estimate:+.2g} ({around.low:+.2g} to {around.high:+.2g})"
    seeds = "-" if decided else f"more than {paired.MOST_SEEDS}" if needed is None else str(needed)
    return span, str(one.verdict), f"{one.detectable:.2g}", seeds


def _name(arm: ArmName) -> str:
    return NAMES.get(arm.name, arm.name) + (f", N = {arm.accumulation_steps}" if arm.accumulation_steps > 1 else "")


def _curves(rows: Mapping[int, Row]) -> list[Any]:
    return [row["curve_probe_loss"] for row in rows.values()]
