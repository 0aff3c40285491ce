"""The small files of a trial: written whole or not at all, and checked when they are read.

`trial.json` is plain JSON, one member a line. The first member is the SHA-256 of every byte after the first line, so that any
change of the file shows; `steps_sha256` is the checksum of the `steps.parquet` beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
PARTIAL = ".partial"  # suffix of a file that is being written aside, after a number that no other writer has


class StoreError(RuntimeError):
    """A result that cannot be read or written; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class StoredTrial:
    """A finished trial as `trial.json` tells it."""

    folder: Path
    experiment: str
    trial: str
    config: dict[str, Any] = field(repr=False)
    arms: list[dict[str, Any]] = field(repr=False)  # one verdict row per arm: the columns of verdicts.csv, and evidence
    environment: dict[str, Any] = field(repr=False)
    seconds: float
    num_rows: int  # step rows in steps.parquet
    record: dict[str, Any] = field(repr=False)  # the whole file, with whatever else the engine put into it


def write_atomically(path: Path, content: bytes) -> None:
    """Write aside, sync, and move into place: readers see the old file or the new one, also after a loss of power. OSError."""
    aside = path.with_name(f"{path.name}.{secrets.randbits(48)}{PARTIAL}")  # processes in two containers may have one number
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write `trial.json`."""
    body = (",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items()) + "}\n").encode()
    write_atomically(folder / "trial.json", _first_line(body) + b"\n" + body)


def read_trial(folder: Path) -> StoredTrial:
    """Read `trial.json`; FileNotFoundError when there is none, StoreError when it is not what was written."""
    path = folder / "trial.json"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(path) from error
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    first, _, body = content.partition(b"\n")
    if first != _first_line(body):
        raise StoreError(f"{path}: checksum does not match its content")
    record = json.loads(content)
    if record["format"] != FORMAT:
        raise StoreError(f"{path}: format {record['format']}, this version reads {FORMAT}")
    if (record["experiment"], record["trial"]) != (folder.parent.name, folder.name):
        raise StoreError(f"{path}: belongs to {record['experiment']}/{record['trial']}")
    named = {name: record[name] for name in ("experiment", "trial", "config", "arms", "environment", "seconds")}
    return StoredTrial(folder=folder, num_rows=record["steps"], record=record, **named)


def read_steps(trial: StoredTrial) -> bytes:
    """Content of `steps.parquet`; StoreError when it is not the one that was written with `trial.json`."""
    path = trial.folder / "steps.parquet"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != trial.record["steps_sha256"]:
        raise StoreError(f"{path}: checksum does not match trial.json")
    return content


def damage(folder: Path) -> str | None:
    """Why a `trial.json` and its `steps.parquet` cannot be trusted; None when they can, or when there is no `trial.json`."""
    try:
        read_steps(read_trial(folder))
    except FileNotFoundError:
        return None
    except StoreError as error:
        return str(error)
    return None


def write_failed(folder: Path, error: str) -> None:
    """Write `failed.json`; `error` is a traceback or its last line."""
    record = {
        "format": FORMAT,
        "experiment": folder.parent.name,
        "trial": folder.name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "error": (error.strip().splitlines() or ["unknown"])[-1],
        "traceback": error,
    }
    write_atomically(folder / "failed.json", (json.dumps(record, indent=1) + "\n").encode())


def _first_line(body: bytes) -> bytes:
    return b'{"sha256": "%s",' % hashlib.sha256(body).hexdigest().encode()
