"""Annotations that a job of GitHub Actions shows at a line.

https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations


def annotation(level: str, message: str, **properties: object) -> str:
    r"""One workflow command: `::error file=...,line=...,title=...::message`; the runner undoes its escapes.

    >>> annotation("error", "50%\nof it", file="a,b.py", line=3)
    '::error file=a%2Cb.py,line=3::50%25%0Aof it'

    Args:
        level: `error`, `warning` or `notice`.
        message: What the job shows; line breaks are kept.
        properties: Where it shows it: `file`, `line`, `title`.

    Returns:
        One line, to be printed.
    """
    told = ",".join(f"{name}={_data(str(value)).replace(':', '%3A').replace(',', '%2C')}" for name, value in properties.items())
    return f"::{level} {told}::{_data(message)}"


def _data(words: str) -> str:
    return words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
