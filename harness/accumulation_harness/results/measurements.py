"""Measurements that several trials need, each made once: `<root>/.measurements/<name>-<hash>.json`.

The hash is that of everything the measurement depends on, the code that makes it included. A file is whole or absent, and its
checksum tells a damaged one, which is made again. Whoever makes one holds a lock, so that a trial that needs it at the same time
can do something else first, and then waits a while. Where nothing can be written, or who has the lock does not come to an end,
every trial measures for itself.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from accumulation_harness.results import locks
from accumulation_harness.results.plain import from_plain, to_plain
from accumulation_harness.results.record import FOLDER_MODE, StoreError, read_checked, write_checked

FOLDER = ".measurements"
MOST_WAIT, GLANCE = 60.0, 0.05  # seconds to wait for another trial, which may have been stopped; between two looks at it
Value = TypeVar("Value")


@dataclass(frozen=True)
class Measurement(Generic[Value]):
    """What is measured, and all that its result depends on."""

    name: str
    kind: Any  # the type of the result, which `plain` can store
    depends_on: Callable[[], Mapping[str, Any]]  # plain JSON types; asked for only where results are shared
    make: Callable[[], Value]

    @cached_property
    def dependence(self) -> Mapping[str, Any]:
        """All that the result depends on, found once."""
        return self.depends_on()

    @cached_property
    def identity(self) -> str:
        """Its name and 16 hex digits of the SHA-256 of what it depends on and of the code."""
        depends = json.dumps([code(), self.dependence], sort_keys=True)
        return f"{self.name}-{hashlib.sha256(depends.encode()).hexdigest()[:16]}"


class Claim(Enum):
    """Whose a measurement is to make and to keep."""

    ours = "ours"
    elsewhere = "elsewhere"  # another process makes it
    nobodys = "nobodys"  # it cannot be kept


class Measurements:
    """Those of the store at `root`, for the trial `made_by`; with None for `root` nothing is kept."""

    def __init__(self, root: Path | None = None, made_by: str = "") -> None:
        self._folder = None if root is None else root / FOLDER
        self._made_by = made_by
        self.used: dict[str, str] = {}  # identity -> the trial that has made it

    def of(self, measurement: Measurement[Value]) -> Value:
        """Its result: read where a trial has made it, else made, and kept for the others."""
        if self._folder is None:
            return measurement.make()
        deadline = time.monotonic() + MOST_WAIT
        while True:
            found = self._read(measurement)
            if found is not None:
                return found
            with self._claimed(measurement) as claim:
                if claim is Claim.elsewhere and time.monotonic() < deadline:
                    time.sleep(GLANCE)
                    continue
                found = self._read(measurement)  # made since we looked
                if found is None:
                    found = measurement.make()
                    self.used[measurement.identity] = self._made_by
                    if claim is Claim.ours:
                        self._write(measurement, found)
                return found

    def is_being_made(self, measurement: Measurement[Any]) -> bool:
        """Whether another process makes it at this moment."""
        if self._folder is None or not self._lock(measurement).exists():
            return False
        with self._claimed(measurement) as claim:
            return claim is Claim.elsewhere

    def _lock(self, measurement: Measurement[Any]) -> Path:
        assert self._folder is not None
        return self._folder / f"{measurement.identity}.lock"

    @contextmanager
    def _claimed(self, measurement: Measurement[Any]) -> Iterator[Claim]:
        """Whose it is to make."""
        assert self._folder is not None
        path, lock, claim = self._lock(measurement), None, Claim.nobodys
        with suppress(OSError):
            self._folder.mkdir(FOLDER_MODE, exist_ok=True)
            if not self._folder.is_symlink():
                lock = locks.take(path)
                claim = Claim.elsewhere if lock is None else Claim.ours
        try:
            yield claim
        finally:
            if lock is not None:
                locks.release(path, lock)

    def _read(self, measurement: Measurement[Value]) -> Value | None:
        """What is stored; None where there is nothing good."""
        assert self._folder is not None
        if self._folder.is_symlink():
            return None
        with suppress(OSError, StoreError, ValueError, TypeError, KeyError, RecursionError):
            record = json.loads(read_checked(self._folder / f"{measurement.identity}.json"))
            found: Value = from_plain(measurement.kind, record["result"])
            self.used[measurement.identity] = str(record["made_by"])
            return found
        return None

    def _write(self, measurement: Measurement[Value], found: Value) -> None:
        assert self._folder is not None
        record = {"made_by": self._made_by, "depends_on": measurement.dependence, "result": to_plain(found)}
        with suppress(OSError):  # a full disk: the trial itself will say so
            write_checked(self._folder / f"{measurement.identity}.json", record)


@cache
def code() -> str:
    """16 hex digits of the SHA-256 of the harness' own source: what another version has measured is another measurement."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
