"""The formats in which a report is told: their names, and the endings of the files that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Format = Literal["text", "json", "markdown", "junit", "sarif", "html"]
TO_STDOUT: tuple[Format, ...] = ("text", "json", "markdown", "junit", "sarif")
ENDINGS: dict[str, Format] = {".sarif": "sarif", ".xml": "junit", ".md": "markdown", ".html": "html", ".json": "json"}


def format_of(path: Path) -> Format:
    """The format that the path's ending names. Raises ValueError for an ending that names none."""
    if path.suffix not in ENDINGS:
        *others, last = ENDINGS
        raise ValueError(f"expected a path ending in {', '.join(others)} or {last}, got {path}")
    return ENDINGS[path.suffix]
