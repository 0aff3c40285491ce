"""The objects of this process that somebody still holds."""

from __future__ import annotations

import gc
from typing import Any


def alive() -> list[Any]:
    """All of them, after a collection: what an earlier run has left behind is no optimizer and no average of this one.

    Returns:
        Objects that the garbage collector knows.
    """
    gc.collect()
    return gc.get_objects()
