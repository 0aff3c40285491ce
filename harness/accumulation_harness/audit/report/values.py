"""Values of the evidence, for readers and for JSON."""

from __future__ import annotations

import math
from typing import Any


def short(value: Any) -> str:
    """Three digits of a number, also in lists.

    >>> short((0.123456, 7, "AdamW"))
    '0.123, 7, AdamW'
    """
    if isinstance(value, (list, tuple)):
        return ", ".join(short(item) for item in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def plain(value: Any) -> Any:
    """JSON types; non-finite numbers become None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (bool, int, str)) or value is None else str(value)
