"""One measured quantity with its target, as a row of the table and of `bench.json`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.bench.cost import Spread


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A value on the clock, the same in processor time where it has one, and what it should be."""

    part: str
    name: str
    unit: str  # "x" for ratios, "s", "MB", "copies"
    wall: Spread
    cpu: Spread | None = None
    target: float | None = None
    at_least: bool = False  # the target is a lower bound
    note: str = ""
    load: tuple[float, ...] = field(default_factory=lambda: tuple(round(x, 2) for x in os.getloadavg()))  # when it was taken

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.wall.median >= self.target if self.at_least else self.wall.median <= self.target


def to_dict(measure: Measure) -> dict[str, Any]:
    return {**asdict(measure), "met": measure.met}


HEAD = ("part", "what", "median", "lowest to highest", "n", "processor time", "target", "", "load")


def table(measures: Sequence[Measure]) -> str:
    """Lines of aligned columns."""
    rows = [HEAD, *(_row(measure) for measure in measures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(measure: Measure) -> tuple[str, ...]:
    bound = "" if measure.target is None else f"{'≥' if measure.at_least else '≤'} {measure.target:g}"
    met = {None: "", True: "met", False: "MISSED"}[measure.met]
    cpu = "" if measure.cpu is None else f"{number(measure.cpu.median)} {measure.unit}"
    span = f"{number(measure.wall.low)} to {number(measure.wall.high)}"
    return (
        measure.part, measure.name, f"{number(measure.wall.median)} {measure.unit}", span, str(measure.wall.n), cpu, bound, met,
        f"{measure.load[0]:.1f}",
    )  # fmt: skip


def number(value: float) -> str:
    """
    >>> number(0.01234), number(12.345), number(1234.5)
    ('0.0123', '12.3', '1234')
    """
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
