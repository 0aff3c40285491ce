"""What an audit concluded, with all ways to tell it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accumulation_harness.audit.report import issue, json_document, junit, markdown, sarif, terminal
from accumulation_harness.audit.report.conclusion import Conclusion
from accumulation_harness.audit.request import Format, format_of
from accumulation_harness.system.files import write_atomically

TELLERS: Mapping[Format, Callable[[Conclusion], str]] = {
    "text": terminal.text,
    "json": json_document.text,
    "markdown": markdown.text,
    "junit": junit.text,
    "sarif": sarif.text,
    "issue": issue.text,
}


class Report(Conclusion):
    """The answer: `equivalent` only when every arm ran, was judged, and no finding was made."""

    def told(self, format: Format) -> str:
        """In one of the formats. Raises ValueError for the issue of a function that is in no file."""
        return TELLERS[format](self)

    def to_dict(self) -> dict[str, Any]:
        """In JSON types; numbers that are not finite are None."""
        return json_document.document(self)

    def to_json(self) -> str:
        """Strict JSON: a non-finite number is written as null."""
        return self.told("json")

    def save(self, path: str | os.PathLike[str], format: Format | None = None) -> Path:
        """Write in a format, or in that of the path's ending, whole or not at all. Raises ValueError for another ending."""
        target = Path(path)
        write_atomically(target, self.told(format or format_of(target)).encode(errors="backslashreplace"))
        return target

    def __str__(self) -> str:
        return self.told("text")
