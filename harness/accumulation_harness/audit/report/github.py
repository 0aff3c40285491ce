"""What GitHub Actions shows of a conclusion: annotations at the audited function, and the summary of the job."""

from __future__ import annotations

import os
from pathlib import Path

from accumulation_harness.audit.report import markdown
from accumulation_harness.audit.report.conclusion import Conclusion
from accumulation_harness.audit.report.frameworks import change
from accumulation_harness.system.github import annotation


def tell(conclusion: Conclusion) -> str:
    """In a job of GitHub Actions: add to its summary, and return the annotations to print. Elsewhere nothing, and empty text.

    A summary that cannot be written is an annotation, and changes nothing else.
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
    return commands(conclusion) + unwritten


def commands(conclusion: Conclusion) -> str:
    """One annotation per finding and problem."""
    subject = conclusion.subject
    place = {} if subject is None else {"file": subject.train.seen_from(subject.root), "line": subject.train.line}
    told = [(f"N={f.accumulation_steps}: {f.cause}", f"{f.message}\n{change(conclusion, f.cause)}") for f in conclusion.findings]
    told += [("the audit could not judge", line) for line in conclusion.problems]
    return "".join(annotation("error", message, **place, title=title) + "\n" for title, message in told)
