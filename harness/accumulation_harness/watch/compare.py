"""Watched runs whose reports lie in files: one shown, or two beside each other, of one training at different splits, say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accumulation_harness.system.files import read_file
from accumulation_harness.system.terminal import in_columns
from accumulation_harness.watch.report import FORMAT, Report

KEYS = ("verdict", "causes", "windows", "micro_batches", "checked", "properties")
CLOSE = 0.05  # relative difference of two metrics that is no difference worth a word


def read(path: Path) -> Mapping[str, Any]:
    """Read a report as `seen.report("run.json")` wrote it.

    Args:
        path: The file.

    Returns:
        What `Report.of` takes.

    Raises:
        ValueError: It is anything else, told in a line.
    """
    try:
        found = json.loads(read_file(path))
    except OSError as error:
        raise ValueError(f"{path}: expected the report of a watch, which cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path}: expected the report of a watch, got no JSON ({error})") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a report of the format '{FORMAT}', got another file")
    return found


def shown(path: Path) -> str:
    """Show the report of a run, which may still go on.

    Args:
        path: What a watch has saved as JSON.

    Returns:
        The report as text.

    Raises:
        ValueError: The file is no report, or one of another format.
    """
    try:
        return f"{Report.of(read(path))}\n"
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a report of the format '{FORMAT}', of which something is missing: {error}") from error


def compared(a: Path, b: Path) -> str:
    """Compare two reports.

    Args:
        a: What a watch has saved as JSON.
        b: Another.

    Returns:
        A table of both; what differs is marked.
    """
    told = [{**found, **found["metrics"], **found["versions"]} for found in (read(a), read(b))]
    parts = [name for part in ("metrics", "versions") for name in sorted({*told[0][part], *told[1][part]})]
    rows = [(name, *(_shown(one.get(name)) for one in told)) for name in (*KEYS, *parts)]
    marked = [(name, x, y, "" if x == y or _close(x, y) else "<- differs") for name, x, y in rows]
    return "\n".join(in_columns([("", a.name, b.name, ""), *marked])) + "\n"


def _shown(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(item)}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _close(x: str, y: str) -> bool:
    try:
        a, b = float(x), float(y)
    except ValueError:
        return False
    return abs(a - b) <= CLOSE * max(abs(a), abs(b))
