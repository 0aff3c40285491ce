"""The versions of installed packages."""

from __future__ import annotations

import platform


def version(name: str) -> str | None:
    """Of an installed distribution; None when there is none of that name."""
    import importlib.metadata  # 0.03 s, at the start of every command

    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def versions() -> str:
    """Ours, and those of what the numbers depend on."""
    tool, torch = (version(name) or "not installed" for name in ("accumulation-harness", "torch"))
    return f"accumulation-harness {tool} (torch {torch}, Python {platform.python_version()})"
