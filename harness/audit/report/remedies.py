"""Where the documentation says what to change."""

from __future__ import annotations

from harness.judge.cause import Cause

REMEDIES = "docs/remedies.md"


def remedy(cause: Cause) -> str:
    """`docs/remedies.md#CAUSE`."""
    return f"{REMEDIES}#{cause}"
