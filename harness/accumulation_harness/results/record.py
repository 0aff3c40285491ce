"""The small files of a trial: written whole or not at all, and checked when they are read.

`trial.json` is plain JSON, one member a line. The first member is the SHA-256 of every byte after the first line, so that any
change of the file shows; `steps_sha256` is the checksum of the `steps.parquet` beside it. The last member, `evidence`, is on
what the verdicts rest: much the longest, and read by those alone who ask for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accumulation_harness.system.files import read_file, write_atomically

FORMAT = 2
EVIDENCE = b',\n"evidence": '
MOST_TOLD = 10  # lines about things of one kind
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class StoreError(RuntimeError):
    """A result that cannot be read or written; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class StoredTrial:
    """A finished trial, as read from its `trial.json`."""

    folder: Path
    experiment: str
    trial: str
    config: dict[str, Any] = field(repr=False)
    arms: list[dict[str, Any]] = field(repr=False)  # one row per arm: `judged_arm`
    environment: dict[str, Any] = field(repr=False)
    seconds: Mapping[str, float]  # by phase
    record: dict[str, Any] = field(repr=False)  # the whole file, with whatever else the engine put into it


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write `trial.json`, whose first line is the checksum of the others; the `evidence` of the arms comes last.

    Args:
        folder: Folder of the trial.
        record: Settings, environment and arms.
    """
    arms = [{name: value for name, value in arm.items() if name != "evidence"} for arm in record["arms"]]
    whole = {"format": FORMAT, **record, "arms": arms, "evidence": [arm.get("evidence") for arm in record["arms"]]}
    body = (",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in whole.items()) + "}\n").encode()
    write_atomically(folder / "trial.json", _first_line(body) + b"\n" + body)


def read_trial(folder: Path, *, evidence: bool = False) -> StoredTrial:
    """Read the `trial.json` of a finished trial.

    Args:
        folder: The folder of the trial.
        evidence: Whether to read what the verdict of each arm rests on as well.

    Returns:
        The trial.

    Raises:
        FileNotFoundError: The trial is not finished.
        StoreError: The file is damaged, or was written by another version or for another trial.
    """
    path = folder / "trial.json"
    try:
        content = read_file(path)
        first, _, body = content.partition(b"\n")
        if first != _first_line(body):
            raise StoreError(f"{path}: checksum does not match its content")
        record = json.loads(content if evidence else content[: content.rindex(EVIDENCE)] + b"}")
        del record["sha256"]
        if record.pop("format") != FORMAT:
            raise StoreError(f"{path}: of another version of the harness")
        if (record["experiment"], record["trial"]) != (folder.parent.name, folder.name):
            raise StoreError(f"{path}: belongs to {record['experiment']}/{record['trial']}")
        if _SURROGATE.search(content):  # halves of characters, which can be written nowhere
            json.dumps(record, ensure_ascii=False).encode()
        for arm, one in zip(record["arms"], record.pop("evidence", ()), strict=False):
            arm["evidence"] = one
        named = {name: record[name] for name in ("experiment", "trial", "config", "arms", "environment", "seconds")}
        return StoredTrial(folder=folder, record=record, **named)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(path) from error
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # whole, and not written by this engine
        raise StoreError(f"{path}: is no record of a trial ({type(error).__name__}: {error})") from error


def read_steps(trial: StoredTrial) -> bytes:
    """Read `steps.parquet`, and check that it was written with this `trial.json`.

    Args:
        trial: A trial whose record has been read.

    Returns:
        Parquet.

    Raises:
        StoreError: The file is missing or is another one.
    """
    path = trial.folder / "steps.parquet"
    try:
        content = read_file(path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != trial.record.get("steps_sha256"):
        raise StoreError(f"{path}: checksum does not match trial.json")
    return content


def write_failed(folder: Path, error: str) -> None:
    """Write `failed.json`; `error` is a traceback or its last line.

    Args:
        folder: Folder of the trial.
        error: A traceback, or its last line.
    """
    last = (error.strip().splitlines() or ["unknown"])[-1]
    record = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "error": last, "traceback": error}
    write_atomically(folder / "failed.json", (json.dumps(record, indent=1) + "\n").encode())


def in_one_line(text: str) -> str:
    """Escape line breaks, and everything else that a terminal would interpret.

    Args:
        text: Any text.

    Returns:
        The text on one line.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def summarised(findings: Sequence[str], what: str) -> list[str]:
    """Format findings as lines, each after a heading.

    Args:
        findings: The findings.
        what: The heading.

    Returns:
        The lines; of many findings the first ones, and how many more there are.
    """
    more = [f"{what}: {len(findings) - MOST_TOLD} more"] if len(findings) > MOST_TOLD else []
    return [*(f"{what}: {one}" for one in findings[:MOST_TOLD]), *more]


def _first_line(body: bytes) -> bytes:
    return b'{"sha256": "%s",' % hashlib.sha256(body).hexdigest().encode()
