"""What GitHub Actions shows of a conclusion: annotations at the audited function, and the summary of the job.

https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import os
from pathlib import Path

from accumulation_harness.audit.report import markdown
from accumulation_harness.audit.report.conclusion import Conclusion
from accumulation_harness.audit.report.frameworks import change


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
            unwritten = f"::warning title=no summary::{_data(str(error))}\n"
    return commands(conclusion) + unwritten


def commands(conclusion: Conclusion) -> str:
    """One workflow command per finding and problem: `::error file=...,line=...,title=...::message`."""
    findings = [
        (f"N={f.accumulation_steps}: {f.cause}", f"{f.message}\n{change(conclusion, f.cause)}") for f in conclusion.findings
    ]
    problems = [("the audit could not judge", line) for line in conclusion.problems]
    return "".join(_command(conclusion, title, message) for title, message in (*findings, *problems))


def _command(conclusion: Conclusion, title: str, message: str) -> str:
    subject = conclusion.subject
    place = {} if subject is None else {"file": subject.train.seen_from(subject.root), "line": str(subject.train.line)}
    properties = ",".join(f"{name}={_property(value)}" for name, value in {**place, "title": title}.items())
    return f"::error {properties}::{_data(message)}\n"


def _data(words: str) -> str:
    r"""A message: the runner undoes these escapes.

    >>> _data("50%\nof it")
    '50%25%0Aof it'
    """
    return words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(words: str) -> str:
    return _data(words).replace(":", "%3A").replace(",", "%2C")
