"""What GitHub Actions shows of a conclusion: annotations, at the lines of findings where these are known, and a job's summary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.report import markdown
from accumulation_harness.audit.report.conclusion import Conclusion
from accumulation_harness.audit.report.frameworks import change
from accumulation_harness.audit.report.subject import Subject, seen_from
from accumulation_harness.system.github import annotation


def tell(conclusion: Conclusion) -> str:
    """Add to the summary of a job of GitHub Actions, where this is one.

    A summary that cannot be written is an annotation, and changes nothing else.

    Args:
        conclusion: What the audit says.

    Returns:
        The annotations to print; an empty text elsewhere.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return ""
    unwritten = ""
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(path).open("a", encoding="utf-8", errors="replace") as file:
                file.write(markdown.text(conclusion) + "\n")
        except OSError as error:
            unwritten = annotation("warning", str(error), title="no summary") + "\n"
    return _commands(conclusion) + unwritten


def _commands(conclusion: Conclusion) -> str:
    """One annotation per finding and problem."""
    subject = conclusion.subject
    there = {} if subject is None else {"file": subject.train.seen_from(subject.root), "line": subject.train.line}
    told = [
        (_place(f, subject) or there, f"N={f.accumulation_steps}: {f.cause}", f"{f.message}\n{change(conclusion, f)}")
        for f in conclusion.findings
    ]
    told += [(there, "the audit could not judge", line) for line in conclusion.problems]
    return "".join(annotation("error", message, **place, title=title) + "\n" for place, title, message in told)


def _place(finding: Finding, subject: Subject | None) -> dict[str, Any]:
    """Of a line in the sources; empty where it is not known."""
    site = finding.site
    if site is None or subject is None or not Path(site.file).is_relative_to(subject.root):
        return {}
    return {"file": seen_from(Path(site.file), subject.root), "line": site.line}
