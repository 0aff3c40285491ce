"""What audits and watches both say: a verdict, and numbers as they are written."""

from __future__ import annotations

import math
from typing import Any

from accumulation_harness.system.enums import StrEnum


class Status(StrEnum):
    """The verdict of a run, or of one of its arms."""

    equivalent = "equivalent"
    different = "different"
    inconclusive = "inconclusive"


def short(value: Any) -> str:
    """Format a number, or a list of numbers, with three digits.

    >>> short((0.123456, 7, "AdamW"))
    '0.123, 7, AdamW'

    Args:
        value: A number, a sequence of values, or another object.

    Returns:
        The text.
    """
    if isinstance(value, (list, tuple)):
        return ", ".join(short(item) for item in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def plain(value: Any) -> Any:
    """Convert a value to JSON types.

    Args:
        value: Any nest of mappings, sequences, numbers and other objects.

    Returns:
        The same with mappings as dict, sequences as list, non-finite numbers as None and other objects as text.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (bool, int, str)) or value is None else str(value)
