"""What audits and watches both say: a status, and where the documentation, which is in the package too, tells what to change."""

from __future__ import annotations

from pathlib import Path

from accumulation_harness.judge.cause import Cause
from accumulation_harness.system.enums import StrEnum

REMEDIES = "docs/remedies.md"
PAGE = Path(__file__).parents[2] / "remedies.md"


class Status(StrEnum):
    """What was concluded, of a run or of an arm."""

    equivalent = "equivalent"
    different = "different"
    inconclusive = "inconclusive"


def remedy(cause: Cause) -> str:
    """`docs/remedies.md#CAUSE`."""
    return f"{REMEDIES}#{cause}"


def remedy_here(cause: Cause) -> str:
    """The same where it can be opened: inside the package."""
    return f"{PAGE}#{cause}"
