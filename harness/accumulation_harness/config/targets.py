"""Code of the user's own, named `FILE.py:NAME` or `package.module:NAME`: found without being run, and imported."""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any

from accumulation_harness.config import ConfigError
from accumulation_harness.system.processes import NoAnswer, answered

EXPECTED = "FILE.py:NAME or package.module:NAME"
_modules: dict[str, dict[str, Any]] = {}  # by the folder of a target: those that it has imported from there
_python_import = builtins.__import__
MOST_SECONDS = 300  # for a task to say what its data are
SHOWN = 8  # names of a file that are told


def place(field: str, target: str) -> str:
    """Normalise a target, so that a trial has one name from wherever it is started.

    Args:
        field: The setting that has it, for messages.
        target: `file.py:name` or `package.module:name`.

    Returns:
        The target with its file relative to this folder, or absolute outside of it.

    Raises:
        ConfigError: There is no such file.
    """
    file, (where, _, name) = _file(field, target), target.rpartition(":")
    if not where.endswith(".py"):
        return target
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{name}"


def data_fingerprint(field: str, target: str, arguments: str) -> str:
    """Ask a task, in a process of its own, for what identifies its data.

    Args:
        field: The setting that has the target, for messages.
        target: The task, see `place`.
        arguments: Its keyword arguments as a JSON object.

    Returns:
        16 hex digits of what its `fingerprint()` gives; empty where the file defines none.

    Raises:
        ConfigError: `fingerprint()` raises, gives nothing, or takes longer than `MOST_SECONDS`.
    """
    if b"def fingerprint(" not in _file(field, target).read_bytes():
        return ""
    try:
        return answered(_told, field, target, arguments, seconds=MOST_SECONDS)
    except TimeoutError as error:
        raise ConfigError(field, target, f"fingerprint() that answers within {MOST_SECONDS} s") from error
    except NoAnswer as error:
        raise ConfigError(field, target, f"fingerprint() that gives a text; {error}") from error


def _told(field: str, target: str, arguments: str) -> str:
    """What the task says, where it has the method: that may be another class's of the same file."""
    with redirect_stdout(sys.stderr), expecting(field, target, "fingerprint() that gives a text"):
        task = load(field, target)(**json.loads(arguments))
        return digest_of(task.fingerprint()) if hasattr(task, "fingerprint") else ""


def digest_of(value: object) -> str:
    """Shorten what a task says of its data.

    Args:
        value: Anything; its `str` counts.

    Returns:
        The first 16 hex digits of its SHA-256.
    """
    return hashlib.sha256(str(value).encode()).hexdigest()[:16]


def load(field: str, target: str) -> Callable[..., Any]:
    """Import the user's class or function, here, in the process of a trial.

    Args:
        field: The setting that has it, for messages.
        target: `file.py:name` or `package.module:name`.

    Returns:
        The callable of that name.

    Raises:
        ConfigError: The file is missing or raises on import, or has no callable of that name; the message lists those it has.
    """
    place, _, name = target.rpartition(":")
    file = _file(field, target)
    with expecting(field, target, "a file that can be imported"):
        module = _from_file(file) if place.endswith(".py") else _from_package(place)
    found = getattr(module, name, None)
    if not callable(found):
        own = {one: value for one, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
        near = [one for one, value in own.items() if callable(value)]
        shown = ", ".join(near[:SHOWN] + [f"{len(near) - SHOWN} more"] * (len(near) > SHOWN))
        raise ConfigError(field, target, f"a class or function of that name; {file.name} has {shown or 'none'}")
    return found  # type: ignore[no-any-return]


@contextmanager
def expecting(field: str, target: str, expected: str) -> Iterator[None]:
    """Turn what the user's code raises inside into a `ConfigError`.

    Args:
        field: The setting that has the code, for messages.
        target: Its value.
        expected: What was expected of the code.

    Yields:
        Nothing.

    Raises:
        ConfigError: Something was raised inside: the message has what was expected, what was raised, and file and line.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        own = Path(target.rpartition(":")[0]).name
        mine = [frame for frame in frames if Path(frame.filename).name == own] or frames
        raise ConfigError(field, target, f"{expected}; it raised {said(error)}{where(mine)}") from error


def where(frames: Sequence[traceback.FrameSummary]) -> str:
    """Say where an error was raised.

    Args:
        frames: A traceback, outermost frame first.

    Returns:
        " (file.py:12)" of the last frame, to be appended to a sentence; empty without frames.
    """
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def said(error: BaseException) -> str:
    """Put an exception on one line.

    Args:
        error: The exception.

    Returns:
        Its class and message, "ValueError: no data".
    """
    return " ".join("".join(traceback.format_exception_only(error)).split())


def _file(field: str, target: str) -> Path:
    """The source of the target; found without importing anything."""
    place = target.rpartition(":")[0]
    if place.endswith(".py"):
        file = Path(place).expanduser().resolve()
        if not file.is_file():
            raise ConfigError(field, target, f"{EXPECTED}; there is no file {place}")
        return file
    if (source := module_file(place, ".py", "/__init__.py")) is not None:
        return source.resolve()
    raise ConfigError(field, target, f"{EXPECTED}; there is no module {place} in this folder or in an installed package")


def module_file(name: str, *ends: str) -> Path | None:
    """Find the source of a dotted module without importing it.

    Args:
        name: The module's dotted name.
        ends: What to append to its path, in this order: ".py", "/__init__.py".

    Returns:
        The first such file in the working directory or on `sys.path`; None where there is none.
    """
    roots = (Path.cwd(), *map(Path, sys.path))
    files = (root / (name.replace(".", os.sep) + end) for root in roots for end in ends)
    return next((file for file in files if file.is_file()), None)


def _from_file(file: Path) -> Any:
    folder = str(file.parent)
    name = f"custom_{file.stem}_{hashlib.sha256(folder.encode(errors='surrogateescape')).hexdigest()[:6]}"
    if name in sys.modules:
        return sys.modules[name]
    if folder not in _modules:
        _modules[folder] = {}
        if len(_modules) == 2:
            builtins.__import__ = _import  # type: ignore[assignment]
    with _namespace(folder):
        return import_file(file, name)


@contextmanager
def _namespace(folder: str) -> Iterator[None]:
    """Inside, modules of other targets' folders are not there, and those of this one are, whatever their names."""
    others = [one for one in _modules if one != folder]
    for one in _modules:
        _modules[one] |= _below(one)
    aside = {name: sys.modules.pop(name) for one in others for name in _below(one)}
    path, sys.path[:] = [*sys.path], [folder, *(one for one in sys.path if one != folder and one not in others)]
    sys.modules.update(_modules[folder])
    try:
        yield
    finally:
        _modules[folder] |= _below(folder)
        sys.modules.update(aside)
        sys.path[:] = path if folder in path else [folder, *path]


def _below(folder: str) -> dict[str, Any]:
    """The modules that were imported from a folder, as they are known now."""
    known = [(name, str(getattr(one, "__file__", ""))) for name, one in [*sys.modules.items()]]
    return {name: sys.modules[name] for name, file in known if file.startswith(folder + os.sep)}


def _import(name: str, importer: Mapping[str, Any] | None = None, *rest: Any, **more: Any) -> Any:
    """`__import__` where targets of several folders are there: what is imported late is looked for beside who imports it."""
    folder = _folder_of(str((importer or {}).get("__file__", "")), len(_modules))
    with _namespace(folder) if folder else nullcontext():
        return _python_import(name, importer, *rest, **more)


@lru_cache(maxsize=4096)  # torch imports inside of functions, many times a step
def _folder_of(file: str, _num_folders: int) -> str | None:
    """The target's folder that a file is in, of the folders that are known."""
    return next((one for one in _modules if file.startswith(one + os.sep)), None)


def import_file(file: Path, name: str) -> Any:
    """Import a file as a module, anew each time. Its folder stays importable afterwards.

    Args:
        file: A Python file.
        name: The name that the module gets in `sys.modules`.

    Returns:
        The module.
    """
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _from_package(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(name)
