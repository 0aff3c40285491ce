"""How a setting is declared, and between which values a number means something."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FLOAT16_MAX = 65504.0
MOST_SAMPLES = 60_000  # of a task's training set
MOST_STEPS = 100_000


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """From `low` to `high`, each included unless it says otherwise, and the reason."""

    low: float
    high: float
    why: str
    is_integer: bool = False
    excludes_low: bool = False
    excludes_high: bool = False

    def hold(self, value: float) -> bool:
        """Whether `value` lies between; NaN does not."""
        above = self.low < value if self.excludes_low else self.low <= value
        below = value < self.high if self.excludes_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        low, high = (self.low, self.high) if self.is_integer else (f"{self.low:g}", f"{self.high:g}")
        between = f"{'above' if self.excludes_low else 'from'} {low} {'to below' if self.excludes_high else 'to'} {high}"
        return f"{'an integer' if self.is_integer else 'a number'} {between}"


def integers(low: int, high: int, why: str) -> Bounds:
    """Bound an integer setting from `low` to `high`, both included.

    Args:
        low: Least value.
        high: Greatest value.
        why: What lies beyond, for the message.

    Returns:
        The bounds.
    """
    return Bounds(low=low, high=high, why=why, is_integer=True)


def numbers(low: float, high: float, why: str) -> Bounds:
    """Bound a setting from `low` to `high`, both included.

    Args:
        low: Least value.
        high: Greatest value.
        why: What lies beyond, for the message.

    Returns:
        The bounds.
    """
    return Bounds(low=low, high=high, why=why)


def setting(default: Any, meaning: str = "", bounds: Bounds | None = None, *, also: tuple[str, ...] = ()) -> Any:
    """Declare a field that is set on the command line, with all that is said of it.

    Args:
        default: Its default.
        meaning: One phrase for the help; unless given, what the enum of its values says of itself.
        bounds: Which numbers it takes.
        also: What other programs call it.

    Returns:
        A field of a dataclass.
    """
    told = {"meaning": meaning, "bounds": bounds, "also": also}
    if isinstance(default, dict):
        return field(default_factory=dict, hash=False, metadata=told)
    return field(default=default, metadata=told)
