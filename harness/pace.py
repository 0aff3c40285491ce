"""How far the trial of this process is, told to whoever listens; to nobody unless somebody asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_SECONDS = 1.0


@dataclass
class Pace:
    """Optimizer steps of all arms: how many there will be, and how many there were."""

    tell: Callable[[float], None]  # the share that is done
    expected: int = 0
    done: int = 0
    last: float = 0.0


_pace: Pace | None = None


def listen(tell: Callable[[float], None]) -> None:
    """Call `tell` with the share that is done, once a second at most."""
    global _pace
    _pace = Pace(tell)


def expect(steps: int) -> None:
    """So many steps of single arms are to come."""
    if _pace is not None:
        _pace.expected, _pace.done = steps, 0


def advance(steps: int) -> None:
    """So many were taken."""
    if _pace is None or not _pace.expected:
        return
    _pace.done += steps
    now = time.monotonic()
    if now - _pace.last >= EVERY_SECONDS:
        _pace.last = now
        _pace.tell(min(1.0, _pace.done / _pace.expected))
