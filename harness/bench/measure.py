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
        """By the median; None where there is no target."""
        return self._meets(self.wall.median)

    @property
    def decided(self) -> bool | None:
        """Whether the whole interval of the median says the same."""
        return None if self.target is None else all(self._meets(end) == self.met for end in self.wall.interval)

    def _meets(self, value: float) -> bool | None:
        if self.target is None:
            return None
        return value >= self.target if self.at_least else value <= self.target


def to_dict(measure: Measure) -> dict[str, Any]:
    return {**asdict(measure), "met": measure.met, "decided": measure.decided}


HEAD = ("part", "what", "median", "90 % interval", "lowest to highest", "n", "processor time", "target", "", "load")
LEGEND = "?: the target lies within the interval of the median; more rounds, or a quieter machine, would decide."


def table(measures: Sequence[Measure]) -> str:
    """Lines of aligned columns, and what a `?` means where there is one."""
    rows = [HEAD, *(_row(measure) for measure in measures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines + [LEGEND] * any(measure.decided is False for measure in measures))


def _row(measure: Measure) -> tuple[str, ...]:
    bound = "" if measure.target is None else f"{'≥' if measure.at_least else '≤'} {measure.target:g}"
    met = {None: "", True: "met", False: "MISSED"}[measure.met] + ("?" if measure.decided is False else "")
    cpu = "" if measure.cpu is None else f"{number(measure.cpu.median)} {measure.unit}"
    wall = measure.wall
    sure, span = (f"{number(low)} to {number(high)}" for low, high in (wall.interval, (wall.low, wall.high)))
    return (
        measure.part, measure.name, f"{number(wall.median)} {measure.unit}", sure, span, str(wall.n), cpu, bound,
        met, f"{measure.load[0]:.1f}",
    )  # fmt: skip


def number(value: float) -> str:
    """
    >>> number(0.01234), number(12.345), number(1234.5)
    ('0.0123', '12.3', '1234')
    """
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
