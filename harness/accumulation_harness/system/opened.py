"""The files that this process has read, with their hashes: what a result depends on is recorded, not guessed from its source.

An audit hook hears of every file that Python opens or loads, of every folder that is listed, and of what was looked for in vain.
Left out are the environment (Python, its packages, the system's folders) and what this process has written itself. A library in C
that opens files by itself is seen while it has them mapped; what a subprocess reads is not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import site
import stat
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from accumulation_harness.system.files import open_file

LISTINGS = ("os.listdir", "os.scandir")
EVENTS = frozenset(("open", "import", "os.rename", "sqlite3.connect", "ctypes.dlopen", *LISTINGS))  # with the place of the path
SEEKERS = ("importlib", "pkgutil", "pkg_resources")  # list folders in search of modules
SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/lib64", "/run")
MOST_OF_A_FOLDER = 200  # files that are recorded one by one; more are one entry, with their sizes and times
ABSENT, NAMES, FOLDER, MOVED = "absent", "names", "files", "changed while it was read"  # what is recorded but hashes
Stamp = tuple[int, int, int, int]  # inode, size, and when content and inode were changed

_read: dict[str, Stamp | None] = {}  # by path, as it was when it was first opened
_listed: dict[str, str] = {}
_written: set[str] = set()
_borrowed: dict[str, str] = {}  # what results of other processes depend on that were taken over
_start: list[str] = []  # the folder in which the process was when it began; empty where nothing is followed


def follow() -> None:
    """Record what this process reads from now on."""
    if not _start:
        _start.append(os.getcwd())
        _environment()
        sys.addaudithook(_hear)


def start() -> str:
    """The folder in which this process began; paths below it are relative to it.

    Returns:
        An absolute path.
    """
    return _start[0] if _start else os.getcwd()


def borrow(recorded: Mapping[str, str]) -> None:
    """Count files that another process has read as read by this one.

    Args:
        recorded: The `files` of its `recorded`.
    """
    _borrowed.update(recorded)


def recorded(apart: Path) -> dict[str, Any]:
    """Record what this process has read so far.

    A file has its SHA-256, and its stamp (size and time), by which it is recognised without being read again.

    Args:
        apart: A folder whose files do not count: the process's own results.

    Returns:
        `folder`: where the process began, an absolute path. `files`: path -> what was read there; paths below `folder` are
        relative to it.
    """
    for path in _mapped():
        _note_read(path)
    found, root = dict(_borrowed), os.path.abspath(apart)
    read = {path: stamp for path, stamp in [*_read.items()] if path not in _written and not _is_below(path, root)}
    many = {folder for folder, count in Counter(map(os.path.dirname, read)).items() if count > MOST_OF_A_FOLDER}
    for path, before in read.items():
        now = _stamp(path)
        if os.path.dirname(path) in many:
            path, value = os.path.dirname(path), f"{FOLDER} {_of_folder(os.path.dirname(path), root, deep=True)}"
        elif before is None or now is None:
            value = ABSENT if before is now else ""  # one that is gone was temporary
        else:
            value = _hash(path, now) if now == before else MOVED
        if value:
            found[_name(path)] = value
    found |= {_name(path): f"{NAMES} {names}" for path, names in [*_listed.items()] if not _is_below(path, root)}
    return {"folder": start(), "files": found}


def changed(recorded: Mapping[str, str], folder: str, apart: Path) -> str:
    """Find the first of the recorded files that is not what it was.

    Args:
        recorded: The `files` of `recorded`.
        folder: What relative paths are relative to.
        apart: A folder whose files do not count.

    Returns:
        Path and what happened ("has changed", "is gone", "is there now"); empty where all files are as they were.
    """
    for name, value in recorded.items():
        path, (kind, _, rest) = os.path.join(folder, name), value.partition(" ")
        now = _stamp(path)
        if kind in (NAMES, FOLDER):
            is_same = _of_folder(path, os.path.abspath(apart), deep=kind == FOLDER) == rest
        elif value == ABSENT:
            is_same = now is None
        else:
            is_same = now is not None and (rest == _said(now) or _hash(path, now).partition(" ")[0] == kind)
        if not is_same and value != MOVED:
            return f"{name} {'is there now' if value == ABSENT else 'has changed' if os.path.exists(path) else 'is gone'}"
        if not is_same:
            return f"{name} {MOVED}"
    return ""


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    """The hook: an exception here would be one of whoever opens the file."""
    if event in EVENTS:
        with suppress(Exception):
            _note(event, arguments)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    given = arguments[1 if event in ("import", "os.rename") else 0]
    if not isinstance(given, (str, bytes, os.PathLike)):
        return  # a descriptor, or a module that is no file
    path = os.path.abspath(os.fsdecode(given))
    if path.startswith(_environment()):
        return
    if event in LISTINGS:
        asking = sys._getframe(2).f_code.co_filename
        if path not in _listed and not any(name in asking for name in SEEKERS):
            _listed[path] = ""  # the looking below is none of the process'
            _listed[path] = _of_folder(path, "", deep=False)
    elif event == "os.rename" or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
        _written.add(path)
    else:
        if path.endswith(".pyc"):
            with suppress(ValueError):  # one without a source
                path = importlib.util.source_from_cache(path)
        _note_read(path)


def _note_read(path: str) -> None:
    if path not in _read and not os.path.isdir(path):
        _read[path] = _stamp(path)


def _mapped() -> Iterator[str]:
    """Files that are mapped into memory, as libraries in C do it; Linux tells."""
    with suppress(OSError), open("/proc/self/maps") as maps:
        for path in {line.split(None, 5)[5].rstrip("\n") for line in maps if line.count("/")}:
            if path.startswith("/") and not path.startswith(_environment()):
                yield path


@cache
def _environment() -> tuple[str, ...]:
    """Folders, each with its slash, whose files are named by the versions in the record, not one by one."""
    own = Path(__file__).parents[1]
    temporary = [path for path in (os.environ.get("TMPDIR", ""),) if "/harness-" in path]  # of a command
    python = (sys.prefix, sys.base_prefix, site.getusersitepackages(), *sysconfig.get_paths().values())
    folders = (*python, str(own), *SYSTEM, *temporary)
    return tuple({f"{path.rstrip('/')}/" for folder in folders for path in (folder, os.path.realpath(folder))} - {"/"})


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + os.sep)


def _name(path: str) -> str:
    return os.path.relpath(path, start()) if _is_below(path, start()) else path


def _stamp(path: str) -> Stamp | None:
    """Of a regular file; None where there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns) if stat.S_ISREG(found.st_mode) else None


def _said(stamp: Stamp) -> str:
    return ".".join(map(str, stamp))


@cache
def _hash(path: str, stamp: Stamp) -> str:
    """The SHA-256 of the file that has this stamp, and the stamp; "unread" where it cannot be read."""
    try:
        with open_file(Path(path)) as file:
            digest = hashlib.sha256()
            while part := file.read(1 << 20):
                digest.update(part)
            return f"{digest.hexdigest()} {_said(stamp)}"
    except OSError:
        return "unread"


def _of_folder(path: str, root: str, *, deep: bool) -> str:
    """A digest of the names in a folder but for hidden ones and `root`; `deep`: with size and time of each."""
    digest = hashlib.sha256()
    with suppress(OSError):
        for name in sorted(os.listdir(path)):
            full = os.path.join(path, name)
            if not name.startswith((".", "__pycache__")) and full != root:
                size_and_time = ((_stamp(full) or ()) if deep else ())[1:3]
                digest.update(f"{name}\0{size_and_time}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]
