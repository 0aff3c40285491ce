"""What audits and watches both say: a status, and where the documentation tells what to change."""

from __future__ import annotations

from accumulation_harness.judge.cause import Cause
from accumulation_harness.system.address import page_of
from accumulation_harness.system.enums import StrEnum


class Status(StrEnum):
    """What was concluded, of a run or of an arm."""

    equivalent = "equivalent"
    different = "different"
    inconclusive = "inconclusive"


def remedy(cause: Cause) -> str:
    """Where the cause and what to change are explained: one address, in every format."""
    return page_of(cause)
