"""The conclusion as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping

import jinja2

from accumulation_harness.audit.report.conclusion import Conclusion, Status
from accumulation_harness.audit.report.values import short
from accumulation_harness.judge.cause import MEANINGS

ANSWERS: Mapping[Status, str] = {
    "equivalent": "The micro-batches compute what the batch computes, within what rounding was measured to explain.",
    "different": "The micro-batches do not compute what the batch computes.",
    "inconclusive": "Nothing was found, and not everything could be judged.",
}


def text(conclusion: Conclusion) -> str:
    """HTML that loads nothing."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("accumulation_harness.audit.report", "templates"), autoescape=True
    )
    environment.filters["short"] = short
    return environment.get_template("audit.html").render(
        report=conclusion,
        subject=conclusion.subject,
        steps=conclusion.steps,
        meanings=MEANINGS,
        answer=ANSWERS[conclusion.status],
    )
