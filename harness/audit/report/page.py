"""The conclusion as one self-contained page."""

from __future__ import annotations

import jinja2

from harness.audit.report.conclusion import Conclusion
from harness.audit.report.values import short
from harness.judge.cause import MEANINGS


def text(conclusion: Conclusion) -> str:
    """HTML that loads nothing."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("harness.audit.report", "templates"), autoescape=True)
    environment.filters["short"] = short
    frame = conclusion.frame
    steps = frame[frame.tensor == "all"].to_dict("records")
    return environment.get_template("audit.html").render(report=conclusion, steps=steps, meanings=MEANINGS)
