"""Where the documentation says what to change: the page is in the package too."""

from __future__ import annotations

from pathlib import Path

from accumulation_harness.judge.cause import Cause

REMEDIES = "docs/remedies.md"
PAGE = Path(__file__).parents[2] / "remedies.md"


def remedy(cause: Cause) -> str:
    """`docs/remedies.md#CAUSE`."""
    return f"{REMEDIES}#{cause}"


def remedy_here(cause: Cause) -> str:
    """The same where it can be opened: inside the package."""
    return f"{PAGE}#{cause}"
