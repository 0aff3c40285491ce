"""The versions of installed packages."""

from __future__ import annotations


def version(name: str) -> str | None:
    """Of an installed distribution; None when there is none of that name."""
    import importlib.metadata  # 0.03 s, at the start of every command

    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
