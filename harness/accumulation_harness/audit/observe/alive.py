"""The objects of this process that somebody still holds."""

from __future__ import annotations

import gc
from typing import Any


def alive() -> list[Any]:
    """List all objects that are alive after a garbage collection, so that leftovers of an earlier run do not count.

    Returns:
        Objects that the garbage collector knows.
    """
    gc.collect()
    return gc.get_objects()
