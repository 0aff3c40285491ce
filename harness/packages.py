"""The versions of installed packages."""

from __future__ import annotations

import importlib.metadata


def version(name: str) -> str | None:
    """Of an installed distribution; None when there is none of that name."""
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
