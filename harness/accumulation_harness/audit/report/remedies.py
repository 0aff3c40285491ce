"""What audits and watches both say: a status, numbers, and where the documentation tells what to change."""

from __future__ import annotations

import math
from typing import Any

from accumulation_harness.judge.cause import Cause
from accumulation_harness.system.address import page_of
from accumulation_harness.system.enums import StrEnum


class Status(StrEnum):
    """What was concluded, of a run or of an arm."""

    equivalent = "equivalent"
    different = "different"
    inconclusive = "inconclusive"


def remedy(cause: Cause) -> str:
    """Where the cause and what to change are explained: one address, in every format."""
    return page_of(cause)


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
