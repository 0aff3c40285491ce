"""Locks between processes: a file that one of them holds by flock, which the kernel frees when that process dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from accumulation_harness.results.record import FILE_MODE


def take(path: Path) -> int | None:
    """Descriptor that holds the lock; None when another process holds it. OSError where there is no folder."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # its last holder removed the file between our open and our flock


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one at `path`: its folder may have been deleted, and made again by another process."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def release(path: Path, descriptor: int) -> None:
    """Give the lock back and remove its file."""
    if is_at(path, descriptor):
        path.unlink(missing_ok=True)
    os.close(descriptor)
