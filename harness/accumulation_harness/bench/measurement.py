"""A measured quantity with its target, as a row of the table and of `bench.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from accumulation_harness.bench.cost import Spread


@dataclass(frozen=True, kw_only=True)
class Measurement:
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
        """Whether the median meets the target; None where there is none."""
        return self._meets(self.wall.median)

    @property
    def decided(self) -> bool | None:
        """Whether the whole interval of the median meets the target, or misses it, as the median does."""
        return None if self.target is None else all(self._meets(end) == self.met for end in self.wall.interval)

    def _meets(self, value: float) -> bool | None:
        if self.target is None:
            return None
        return value >= self.target if self.at_least else value <= self.target


def to_dict(one: Measurement) -> dict[str, Any]:
    """The row of `bench.json`: plain JSON types, with `met` and `decided`."""
    return {**asdict(one), "met": one.met, "decided": one.decided}


def from_dict(row: Mapping[str, Any]) -> Measurement:
    """The measurement of a row of `bench.json`."""

    def spread(found: Mapping[str, Any] | None) -> Spread | None:
        return None if found is None else Spread(**{**found, "interval": tuple(found["interval"])})

    wall = spread(row["wall"])
    assert wall is not None
    own = {name: value for name, value in row.items() if name not in ("met", "decided")}
    return Measurement(**{**own, "wall": wall, "cpu": spread(row["cpu"]), "load": tuple(row["load"])})


HEAD = ("part", "what", "median", "90 % interval", "lowest to highest", "n", "processor time", "target", "", "load")
LEGEND = "undecided: the target lies within the interval of the median; more rounds, or a quieter machine, would decide."


def table(measurements: Sequence[Measurement]) -> str:
    """Lines of aligned columns, and what a `?` means where there is one."""
    rows = [HEAD, *(_row(one) for one in measurements)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines + [LEGEND] * any(one.decided is False for one in measurements))


def _row(one: Measurement) -> tuple[str, ...]:
    bound = "" if one.target is None else f"{'≥' if one.at_least else '≤'} {one.target:g}"
    met = "undecided" if one.decided is False else {None: "", True: "met", False: "MISSED"}[one.met]
    cpu = "" if one.cpu is None else f"{number(one.cpu.median)} {one.unit}"
    wall = one.wall
    sure, span = (f"{number(low)} to {number(high)}" for low, high in (wall.interval, (wall.low, wall.high)))
    return (
        one.part, one.name, f"{number(wall.median)} {one.unit}", sure, span, str(wall.n), cpu, bound,
        met, f"{one.load[0]:.1f}",
    )  # fmt: skip


def number(value: float) -> str:
    """Three digits, or all before the point.

    >>> number(0.01234), number(12.345), number(1234.5)
    ('0.0123', '12.3', '1234')
    """
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
