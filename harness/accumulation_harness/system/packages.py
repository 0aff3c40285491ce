"""The versions of installed packages; and whether torch is one."""

from __future__ import annotations

import platform
from importlib.util import find_spec

HAS_TORCH = find_spec("torch") is not None


def version(name: str) -> str | None:
    """Look up the version of an installed distribution.

    Args:
        name: As pip calls it.

    Returns:
        Its version; None where none of that name is installed.
    """
    import importlib.metadata  # 0.03 s, at the start of every command

    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def versions() -> str:
    """Name the versions that an error report needs.

    Returns:
        `accumulation-harness 0.2.0 (torch 2.13.0, Python 3.12.3)`; an absent one is "not installed".
    """
    tool, torch = (version(name) or "not installed" for name in ("accumulation-harness", "torch"))
    return f"accumulation-harness {tool} (torch {torch}, Python {platform.python_version()})"
