"""How far the trial of this process is, told to whoever listens; to nobody unless somebody asks.

Work is counted in optimizer steps of one arm, in the precision under test. What a phase will take is an estimate, and as it ends
is replaced by what it took: a measurement that another trial has made takes nothing, one that has to follow an arm takes more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

EVERY_SECONDS = 1.0


@dataclass
class Pace:
    """The work of a trial: what its phases will take, in their order, and what was done."""

    tell: Callable[[float], None]  # the share that is done
    planned: dict[str, float] = field(default_factory=dict)  # by phase that has not ended
    done: float = 0.0
    in_phase: float = 0.0  # of it, since a phase has ended
    last: float = 0.0

    @property
    def share(self) -> float:
        """Of all work, as it is known now. A phase that takes longer than planned leaves that of the others."""
        first, *others = self.planned.values()
        return self.done / (self.done + max(0.0, first - self.in_phase) + sum(others))


_pace: Pace | None = None


def listen(tell: Callable[[float], None]) -> None:
    """Call `tell` with the share that is done, once a second at most."""
    global _pace
    _pace = Pace(tell)


def plan(work: Mapping[str, float]) -> None:
    """Such work is to come, by phase."""
    if _pace is not None:
        _pace.planned |= work


def advance(work: float) -> None:
    """So much was done."""
    if _pace is None or not _pace.planned:
        return
    _pace.done += work
    _pace.in_phase += work
    now = time.monotonic()
    if now - _pace.last >= EVERY_SECONDS:
        _pace.last = now
        _pace.tell(_pace.share)


def end(phase: str) -> None:
    """Nothing more of the phase is to come."""
    if _pace is not None:
        _pace.planned.pop(phase, None)
        _pace.in_phase = 0.0
