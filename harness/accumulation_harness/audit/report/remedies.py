"""What audits and watches both say: a verdict, numbers, and where the documentation tells what to change."""

from __future__ import annotations

import math
from typing import Any

from accumulation_harness.audit.evidence import Finding
from accumulation_harness.judge.cause import MEANINGS, Cause, Meaning
from accumulation_harness.system.address import page_of
from accumulation_harness.system.enums import StrEnum


class Status(StrEnum):
    """The verdict of a run, or of one of its arms."""

    equivalent = "equivalent"
    different = "different"
    inconclusive = "inconclusive"


WEIGHED = Meaning(
    fault="",
    sentence="micro-batches count differently than at N=1, in a way that no known cause gives: how often is measured",
    remedy="How often each micro-batch counts is in the message (1 is right). Look at what lies between its loss and the "
    "optimizer: what the loss is multiplied by, the buffer that its gradient is added to, and when that is handed over.",
)
PLACED = Meaning(
    fault="",
    sentence="no known cause reproduces the difference: where it begins is known",
    remedy="The first difference is in the module and operation of the message. Look at what they keep between calls, and at "
    "what they take from the number of samples.",
)
UNSEEN = Meaning(
    fault="",
    sentence="the updates differ, and nothing was seen of the micro-batches",
    remedy="Hand over what each micro-batch adds to the gradient, and the gradient that the optimizer takes, "
    "`hand(contribution=...)` and `hand(gradient=...)`; and call `hand(weights=...)` after every step of the optimizer.",
)


def meaning(finding: Finding) -> Meaning:
    """Say what a finding means: of an unexplained one, by what was weighed, placed or seen.

    Args:
        finding: Of an audit.

    Returns:
        Its sentence and its remedy.
    """
    if finding.cause is not Cause.unexplained:
        return MEANINGS[finding.cause]
    known = (
        (PLACED, finding.evidence.get("module")),
        (WEIGHED, finding.evidence.get("counted")),
        (UNSEEN, finding.evidence.get("backwards") == 0),
    )
    return next((one for one, shown in known if shown), MEANINGS[Cause.unexplained])


def remedy(cause: Cause) -> str:
    """Return where a cause is explained.

    Args:
        cause: The cause.

    Returns:
        A URL if the documentation is served somewhere, otherwise a command.
    """
    return page_of(cause)


def short(value: Any) -> str:
    """Format a number, or a list of numbers, with three digits.

    >>> short((0.123456, 7, "AdamW"))
    '0.123, 7, AdamW'

    Args:
        value: A number, a sequence of values, or another object.

    Returns:
        The text.
    """
    if isinstance(value, (list, tuple)):
        return ", ".join(short(item) for item in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def plain(value: Any) -> Any:
    """Convert a value to JSON types.

    Args:
        value: Any nest of mappings, sequences, numbers and other objects.

    Returns:
        The same with mappings as dict, sequences as list, non-finite numbers as None and other objects as text.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (bool, int, str)) or value is None else str(value)
