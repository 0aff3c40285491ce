"""What this process has read, with hashes: what a result depends on is recorded, not guessed from its source.

An audit hook hears of every file that Python opens or loads, of every folder that is listed, of files that a subprocess is given,
and of what was looked for in vain. Of the user's own code it is also known which files, links and environment variables it asks
for, and which packages it imports: these are recorded by version. Left out are the other files of the environment (Python, its
packages, the system's folders) and what this process has written itself. A library in C that opens files by itself is seen while
it has them open or mapped; what a subprocess opens by itself is not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import site
import stat
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from types import FrameType
from typing import Any

from accumulation_harness.system.files import open_file
from accumulation_harness.system.packages import version

LISTINGS = ("os.listdir", "os.scandir")
EVENTS = frozenset(
    ("open", "import", "os.rename", "os.putenv", "sqlite3.connect", "ctypes.dlopen", "subprocess.Popen", *LISTINGS)
)
ASKING = ("os", "genericpath", "posixpath", "pathlib", "collections", "importlib")  # of Python's, for whoever calls them
NUMERIC = ("torch", "numpy")  # packages whose versions count in every trial
OURS = re.compile("TMPDIR$|CUDA_VISIBLE|PYTHON|WANDB|HYDRA|SLURM")  # variables that differ from command to command, or job to job
SEEKERS = ("importlib", "pkgutil", "pkg_resources")  # list folders in search of modules
SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/lib64", "/run")
MOST_OF_A_FOLDER = 200  # files that are recorded one by one; more are one entry, with their sizes and times
ABSENT, NAMES, FOLDER, MOVED = "absent", "names", "files", "changed while it was read"  # what is recorded but hashes
LINK, VERSION, VARIABLE = "link", "version", "variable"
Stamp = tuple[int, int, int, int]  # inode, size, and when content and inode were changed

_read: dict[str, Stamp | None] = {}  # by path, as it was when it was first opened
_listed: dict[str, str] = {}
_asked: dict[str, str] = {}  # links, and variables as $NAME, as they were when the user's code first asked
_imported: set[str] = set()  # names of modules that the user's code imports
_written: set[str] = set()
_copying: tuple[int, int] | None = None  # the place in the code that goes through all variables
_stat, _readlink = os.stat, os.readlink
_borrowed: dict[str, str] = {}  # what results of other processes depend on that were taken over
_start: list[str] = []  # the folder in which the process was when it began; empty where nothing is followed


def follow() -> None:
    """Record what this process reads from now on."""
    if not _start:
        _start.append(os.getcwd())
        _environment()
        sys.addaudithook(_hear)
        _ask(os, "stat", _note_stat)
        _ask(os, "readlink", _note_link)
        _ask(type(os.environ), "__getitem__", _note_variable)
        _ask(type(os.environ), "__iter__", _note_all_variables)


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
    for path in _held():
        _note_read(path)
    found, root = {**_borrowed, **_packages()}, os.path.abspath(apart)
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
    found |= {_name(name): value for name, value in [*_asked.items()] if not _is_below(name, root)}
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
        if kind in (VERSION, VARIABLE):
            is_same = value == (_version(name) if kind == VERSION else _variable(name))
        elif kind == LINK:
            is_same = value == _link(path)
        elif kind in (NAMES, FOLDER):
            is_same = _of_folder(path, os.path.abspath(apart), deep=kind == FOLDER) == rest
        elif value == ABSENT:
            is_same = now is None
        else:
            is_same = now is not None and (rest == _said(now) or _hash(path, now).partition(" ")[0] == kind)
        if not is_same and value != MOVED:
            is_there = kind in (VERSION, VARIABLE) or os.path.lexists(path)
            return f"{name} {'is there now' if value == ABSENT else 'has changed' if is_there else 'is gone'}"
        if not is_same:
            return f"{name} {MOVED}"
    return ""


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    """The hook: an exception here would be one of whoever opens the file."""
    if event in EVENTS:
        with suppress(Exception):
            _note(event, arguments)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        _, words, folder, _ = arguments
        for word in [words] if isinstance(words, (str, bytes)) else [*words]:
            _note_file(os.path.join(folder or "", os.fsdecode(word)))
        return
    if event == "os.putenv":
        if os.environ._data.get(arguments[0]) != arguments[1]:  # type: ignore[attr-defined] # not set to what it is, as by `update`
            _written.add(f"${os.fsdecode(arguments[0])}")
        return
    if event == "import" and _is_own(_asker(sys._getframe(2))):
        _imported.add(arguments[0])
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


def _note_file(given: Any) -> None:
    """What is the path of a regular file counts as read."""
    path = os.path.abspath(os.fsdecode(given))
    if path not in _read and not path.startswith(_environment()) and (stamp := _stamp(path)):
        _read[path] = stamp


def _ask(owner: Any, name: str, note: Callable[[FrameType | None, Any], None]) -> None:
    """Note what a function of Python's is asked, which tells no audit hook of it."""
    original: Callable[..., Any] = getattr(owner, name)

    @wraps(original)
    def asked(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):
            note(sys._getframe(1), args[-1])
        return original(*args, **kwargs)

    setattr(owner, name, asked)
    for known in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
        if original in known:
            known.add(asked)  # else `shutil.copystat` would do without


def _note_stat(frame: FrameType | None, path: Any) -> None:
    """A file that is asked about below the user's code may be opened by a library; one that it misses may come."""
    if isinstance(path, int) or not _is_below_own(frame):
        return
    _note_file(path)
    if _is_own(_asker(frame)) and not (name := os.path.abspath(os.fsdecode(path))).startswith(_environment()):
        _note_read(name)


def _note_link(frame: FrameType | None, path: Any) -> None:
    name = os.path.abspath(os.fsdecode(path))
    if _is_below_own(frame) and not name.startswith(_environment()):
        _asked.setdefault(name, _link(name))


def _note_variable(frame: FrameType | None, name: Any) -> None:
    asker, key = _asker(frame), f"${name}"
    if asker is None or not _is_own(asker) or (id(asker), asker.f_lasti) == _copying or OURS.match(name) or key in _written:
        return
    _asked.setdefault(key, _variable(key))


def _note_all_variables(frame: FrameType | None, _environ: Any) -> None:
    """Who copies all variables, as for a subprocess, does not ask for each."""
    global _copying
    asker = _asker(frame)
    _copying = asker and (id(asker), asker.f_lasti)


def _asker(frame: FrameType | None) -> FrameType | None:
    """The code that asks, whatever of Python's it calls for that."""
    while frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in ASKING:
        frame = frame.f_back
    return frame


def _is_own(frame: FrameType | None) -> bool:
    """Whether code of the user's runs there, that is no package."""
    return frame is not None and _is_own_file(frame.f_code.co_filename)


@cache
def _is_own_file(name: str) -> bool:
    return not name.startswith("<") and not os.path.abspath(name).startswith(_environment())


def _is_below_own(frame: FrameType | None) -> bool:
    while frame is not None and not _is_own(frame):
        frame = frame.f_back
    return frame is not None


def _held() -> Iterator[str]:
    """Files that are open or mapped into memory now, as libraries in C do it; Linux tells."""
    found: set[str] = set()
    with suppress(OSError), open("/proc/self/maps") as maps:
        found |= {line.split(None, 5)[5].rstrip("\n") for line in maps if line.count("/")}
    with suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}") as about:
                if int(about.read().partition("flags:")[2].split()[0], 8) & (os.O_WRONLY | os.O_RDWR) == 0:
                    found.add(_readlink(f"/proc/self/fd/{descriptor}"))
    yield from (path for path in found if path.startswith("/") and not path.startswith(_environment()) and _stamp(path))


def _packages() -> dict[str, str]:
    """The packages that the user's code imports, and those that every trial computes with; modules that are not there."""
    from importlib.metadata import packages_distributions

    found = {name: _version(name) for name in NUMERIC if name in sys.modules}
    tops = {name.partition(".")[0] for name in _imported} - sys.stdlib_module_names
    distributions = packages_distributions() if tops else {}
    for top in tops:
        if top in distributions:
            found |= {name: _version(name) for name in distributions[top]}
        elif top not in sys.modules:
            found[top] = _version(top)
    own = [path for path in dict.fromkeys(map(os.path.abspath, sys.path)) if not f"{path}/".startswith(_environment())]
    files = [os.path.join(path, *name.split(".")) + ".py" for name in _imported if name not in sys.modules for path in own]
    return found | {_name(path): ABSENT for path in files if not os.path.exists(path)}


@cache
def _version(name: str) -> str:
    return f"{VERSION} {version(name)}"


def _variable(name: str) -> str:
    """Of $NAME a digest that tells a change; it is too short to tell the value, which may be a password."""
    value = os.environ._data.get(os.environ.encodekey(name[1:]))  # type: ignore[attr-defined] # unheard
    return f"{VARIABLE} {value if value is None else hashlib.sha256(value).hexdigest()[:8]}"


def _link(path: str) -> str:
    with suppress(OSError):
        return f"{LINK} {hashlib.sha256(os.fsencode(_readlink(path))).hexdigest()[:16]}"
    return LINK


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
        found = _stat(path)
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
