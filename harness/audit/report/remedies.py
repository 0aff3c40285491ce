"""Where the documentation says what to change: the page is in the package too."""

from __future__ import annotations

from pathlib import Path

from harness.judge.cause import Cause

REMEDIES = "docs/remedies.md"
_INSTALLED = Path(__file__).resolve().parents[2] / "remedies.md"


def remedy(cause: Cause) -> str:
    """`docs/remedies.md#CAUSE`."""
    return f"{REMEDIES}#{cause}"


def remedy_here(cause: Cause) -> str:
    """The same where it can be opened: inside the package when installed from a wheel, else in the source tree."""
    return f"{_INSTALLED}#{cause}" if _INSTALLED.is_file() else remedy(cause)
