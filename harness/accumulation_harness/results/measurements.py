"""Measurements that several trials need, each made once: `<root>/.measurements/<name>-<hash>`, in MessagePack.

The hash is that of everything the measurement depends on, the code that makes it included; beside the result stand the files that
its maker had read, and it counts while these are what they were. A file is whole or absent, and its checksum tells a damaged one,
which is made again. Whoever makes one holds a lock, so that a trial that needs it at the same time
can do something else first, and then waits a while. Where nothing can be written, or who has the lock does not come to an end,
every trial measures for itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from filelock import FileLock, Timeout

from accumulation_harness.system import opened
from accumulation_harness.system.files import make_folders, read_file, write_atomically

FOLDER = ".measurements"
CHECKSUM = hashlib.sha256().digest_size  # bytes at the start of a file
MOST_WAIT = 60.0  # seconds, for another trial, which may have been stopped
Value = TypeVar("Value")


@dataclass(frozen=True)
class Measurement(Generic[Value]):
    """A measurement that trials can share: how to make it, and everything that its result depends on."""

    name: str
    kind: Any  # the type of the result: dataclasses, collections, numbers and texts
    depends_on: Callable[[], Mapping[str, Any]]  # plain JSON types; asked for only where results are shared
    make: Callable[[], Value]

    @cached_property
    def identity(self) -> str:
        """Its name and 16 hex digits of the SHA-256 of what it depends on and of the code."""
        depends = json.dumps([code(), self.depends_on()], sort_keys=True)
        return f"{self.name}-{hashlib.sha256(depends.encode()).hexdigest()[:16]}"


class Measurements:
    """The shared measurements of a store.

    With None for `root` nothing is kept, and every measurement is made anew.
    """

    def __init__(self, root: Path | None = None, made_by: str = "") -> None:
        self._root, self._folder = root or Path(), None if root is None else root / FOLDER
        self._made_by = made_by
        self.used: dict[str, str] = {}  # identity -> the trial that has made it

    def of(self, measurement: Measurement[Value]) -> Value:
        """Return the result of a measurement: read if another trial has made it, otherwise made and kept.

        Args:
            measurement: What to measure.

        Returns:
            Its result.
        """
        if self._folder is None:
            return measurement.make()
        found = self._read(measurement)
        if found is not None:
            return found
        lock = self._lock(measurement)
        with suppress(OSError, Timeout):  # without it we measure for ourselves
            make_folders(self._root, FOLDER)
            lock.acquire(timeout=MOST_WAIT)
        try:
            found = self._read(measurement)  # made since we looked
            if found is None:
                found = measurement.make()
                self.used[measurement.identity] = self._made_by
                if lock.is_locked:
                    self._write(measurement, found)
            return found
        finally:
            lock.release()

    def is_being_made(self, measurement: Measurement[Any]) -> bool:
        """Whether another process makes it at this moment."""
        if self._folder is not None and self._path(measurement, ".lock").exists():
            with suppress(OSError):
                try:
                    self._lock(measurement).acquire(timeout=0).lock.release()
                except Timeout:
                    return True
        return False

    def _path(self, measurement: Measurement[Any], suffix: str = "") -> Path:
        assert self._folder is not None
        return self._folder / f"{measurement.identity}{suffix}"

    def _lock(self, measurement: Measurement[Any]) -> FileLock:
        return FileLock(self._path(measurement, ".lock"))

    def _read(self, measurement: Measurement[Value]) -> Value | None:
        """What is stored; None where there is nothing good."""
        with suppress(OSError, msgspec.MsgspecError):
            if (body := _body(self._path(measurement))) is not None:
                made_by, files, plain = msgspec.msgpack.decode(body, type=tuple[str, dict[str, str], Any])
                found: Value = msgspec.convert(plain, measurement.kind)
                if opened.changed(files, opened.start(), self._root):
                    return None
                opened.borrow(files)
                self.used[measurement.identity] = made_by
                return found
        return None

    def _write(self, measurement: Measurement[Value], found: Value) -> None:
        body = msgspec.msgpack.encode((self._made_by, opened.recorded(self._root)["files"], found))
        with suppress(OSError):  # a full disk: the trial itself will say so
            write_atomically(self._path(measurement), hashlib.sha256(body).digest() + body)
            self._path(measurement, ".lock").unlink(missing_ok=True)


def is_whole(path: Path) -> bool:
    """Decide whether the file of a measurement is undamaged.

    Args:
        path: The file.

    Returns:
        Whether its checksum matches.
    """
    try:
        return _body(path) is not None
    except OSError:
        return False


def _body(path: Path) -> bytes | None:
    content = read_file(path)
    checksum, body = content[:CHECKSUM], content[CHECKSUM:]
    return body if checksum == hashlib.sha256(body).digest() else None


@cache
def code() -> str:
    """16 hex digits of the SHA-256 of the harness' own source: what another version has measured is another measurement.

    Returns:
        The digits.
    """
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
