"""What a finding of an audit means, and what to change."""

from __future__ import annotations

from accumulation_harness.audit.evidence import Finding
from accumulation_harness.judge.cause import MEANINGS, Cause, Meaning

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
    if finding.is_named:
        return MEANINGS[finding.cause]
    known = (
        (PLACED, finding.evidence.get("module")),
        (WEIGHED, finding.evidence.get("counted")),
        (UNSEEN, finding.evidence.get("backwards") == 0),
    )
    return next((one for one, shown in known if shown), MEANINGS[Cause.unexplained])
