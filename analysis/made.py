"""What a report was made from: `<out>/.made.json`. Where nothing has changed since, the pages that stand are the answer.

Files are told apart by name, size, inode and the times at which the system last changed them, contents unread; the code that
makes the pages counts as well.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import accumulation_harness
from accumulation_harness.results.record import write_atomically

RECORD = ".made.json"
MIRROR = "wandb"  # folders that no page is made from
PACKAGE = Path(accumulation_harness.__file__ or "").parent
CODE = (PACKAGE, PACKAGE / "analysis", PACKAGE / "experiments")  # the last two may be links


def standing(results: Path, out: Path) -> list[str] | None:
    """What was said when the pages in `out` were made, if they are those of the results as they are; else None."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((out / RECORD).read_bytes())
        if record["sources"] == sources_of(results) and record["pages"] == _digest(_pages(out)):
            return [str(line) for line in record["said"]]
    return None


def note(results: Path, out: Path, sources: str, said: Sequence[str]) -> None:
    """Write down that the pages in `out` are made from `sources`, which were those of `results` before they were read."""
    if sources == sources_of(results):  # else a trial has ended meanwhile, and they may be those of before
        record = {"sources": sources, "pages": _digest(_pages(out)), "said": list(said)}
        write_atomically(out / RECORD, (json.dumps(record) + "\n").encode())


def sources_of(results: Path) -> str:
    """A digest of all that a report of `results` is made from."""
    code = [line for folder in CODE for line in _files(folder, suffixes=(".py", ".html", ".css", ".csv", ".md", ".json"))]
    return _digest([*code, *_files(results)])


def _pages(out: Path) -> list[str]:
    return [line for line in _files(out) if not line.startswith(f"{out / RECORD} ")]


def _files(folder: Path, suffixes: tuple[str, ...] = ("",)) -> Iterator[str]:
    """A line for every file below; nothing where the folder cannot be read."""
    entries: list[os.DirEntry[str]] = []
    with suppress(OSError), os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in (MIRROR, "__pycache__"):
                yield from _files(Path(entry.path), suffixes)
        elif entry.name.endswith(suffixes):
            with suppress(OSError):
                of = entry.stat(follow_symlinks=False)
                yield f"{entry.path} {of.st_size} {of.st_ino} {of.st_mtime_ns} {of.st_ctime_ns}"


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
