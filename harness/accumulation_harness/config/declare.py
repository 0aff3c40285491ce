"""How a setting is declared, and between which values a number means something."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FLOAT16_MAX = 65504.0
MOST_SAMPLES = 60_000  # of a task's training set
MOST_STEPS = 100_000


@dataclass(frozen=True)
class Bounds:
    """From `low` to `high`, each included unless it says otherwise, and what lies beyond; of integers where its ends are."""

    low: float
    high: float
    why: str
    excludes_low: bool = field(default=False, kw_only=True)
    excludes_high: bool = field(default=False, kw_only=True)

    @property
    def is_integer(self) -> bool:
        """Whether only integers are meant."""
        return isinstance(self.low, int)

    def hold(self, value: float) -> bool:
        """Whether `value` lies between; NaN does not."""
        above = self.low < value if self.excludes_low else self.low <= value
        below = value < self.high if self.excludes_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        low, high = (self.low, self.high) if self.is_integer else (f"{self.low:g}", f"{self.high:g}")
        between = f"{'above' if self.excludes_low else 'from'} {low} {'to below' if self.excludes_high else 'to'} {high}"
        return f"{'an integer' if self.is_integer else 'a number'} {between}"


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
