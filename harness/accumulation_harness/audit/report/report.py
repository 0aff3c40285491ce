"""What an audit concluded, with all ways to tell it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accumulation_harness.audit.report import figure, issue, json_document, junit, markdown, sarif, terminal
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
    "svg": figure.text,
}


class Report(Conclusion):
    """The result of an audit.

    `verdict` is "equivalent" only if every N ran, could be judged, and no difference was found; else "different" or
    "inconclusive". `str(report)` is the table and the findings of the terminal.
    """

    def told(self, format: Format) -> str:
        """Return the report in one of the formats.

        Args:
            format: "text", "json", "markdown", "junit", "sarif", "svg" or "issue".

        Returns:
            The whole document.

        Raises:
            ValueError: An issue is asked for, and the function is in no file.
        """
        return TELLERS[format](self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types; numbers that are not finite are None."""
        return json_document.document(self)

    def to_json(self) -> str:
        """Return the report as strict JSON; numbers that are not finite are null."""
        return self.told("json")

    def save(self, path: str | os.PathLike[str], format: Format | None = None) -> Path:
        """Write the report to a file, atomically.

        Args:
            path: The file.
            format: A name as for `told`; by default the path's ending decides (.json, .md, .xml, .sarif, .svg).

        Returns:
            The path.

        Raises:
            ValueError: The ending belongs to no format.
        """
        target = Path(path)
        write_atomically(target, self.told(format or format_of(target)).encode(errors="backslashreplace"))
        return target

    def __str__(self) -> str:
        return self.told("text")
