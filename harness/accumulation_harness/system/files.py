"""Files that are written whole or not at all, and read only where they are files."""

from __future__ import annotations

import errno
import glob
import io
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

PARTIAL = ".partial"  # suffix of a file that is being written aside, after a number that no other writer has
LEFT_SECONDS = 600.0  # that such a file is not written to any more: its writer was killed


def open_file(path: Path) -> io.FileIO:
    """A regular file, to be read.

    Args:
        path: Any path.

    Returns:
        The open file.

    Raises:
        OSError: It is no regular file, or cannot be opened.
    """
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_file(path: Path, most: int = -1) -> bytes:
    """Read a regular file. Links, folders and devices are refused, so that a reader never waits on a pipe.

    Args:
        path: The file.
        most: The number of bytes to stop after; -1 reads all.

    Returns:
        Its content.

    Raises:
        OSError: It is no regular file, or cannot be read.
    """
    with open_file(path) as file:
        return file.read(most)


def make_folders(root: Path, *names: str) -> Path:
    """Make folders in one another below a root, none of which may be a link: what is written there stays below the root.

    Args:
        root: A folder, or a link to one.
        *names: The folders, each in the one before.

    Returns:
        The last folder.

    Raises:
        OSError: One of them is a link or no folder, or cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        root = root / name
        if root.is_symlink():
            raise OSError(errno.ELOOP, "Is a link, which may lead elsewhere", str(root))
        root.mkdir(exist_ok=True)
    return root


def keep_others_out() -> None:
    """Where the umask lets everybody write what this process and its children create, leave that to their user alone."""
    if (mask := os.umask(0o022)) & 0o002:
        os.umask(mask)


def write_atomically(path: Path, content: bytes) -> None:
    """Write aside, sync, and move into place: readers see the old file or the new one, also after a loss of power.

    A file that is replaced keeps its rights, and a link is replaced, not followed. What killed writers of the same name have left
    aside is removed.

    Args:
        path: The file that is written or replaced. Its folder must exist.
        content: All of its new content.

    Raises:
        OSError: The disk is full, or the folder cannot be written. The old file is then as it was.
    """
    aside = path.with_name(f"{path.name}.{secrets.randbits(48)}{PARTIAL}")  # processes in two containers may have one number
    try:
        with open(aside, "xb") as file:
            file.write(content)
            file.flush()
            _take_over_rights(path, file.fileno())
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a write that fails names no file, and nobody knows the one aside
        raise
    with suppress(OSError):
        for left in path.parent.glob(f"{glob.escape(path.name)}.[0-9]*{PARTIAL}"):
            if time.time() - left.lstat().st_mtime > LEFT_SECONDS:
                left.unlink()
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, content: bytes) -> None:
    """Add to the end of a file in one write, which a killed writer has made whole or not at all.

    Args:
        path: The file, which is begun if it is not there.
        content: What is added.

    Raises:
        OSError: The disk is full, or the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


def _take_over_rights(path: Path, descriptor: int) -> None:
    with suppress(FileNotFoundError):
        old = os.lstat(path).st_mode
        if stat.S_ISREG(old) and old != os.fstat(descriptor).st_mode:
            os.fchmod(descriptor, stat.S_IMODE(old))
