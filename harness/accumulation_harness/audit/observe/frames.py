"""The code under way that leads to a call: whose it is, and which line of the audited code makes the call."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import FrameType

from accumulation_harness.audit.evidence import Site

UNINSTALLED = "code that is not installed"
INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
CALL = ("_call", str(Path(__file__).with_name("runs.py")))  # what calls the audited function
TORCH = tuple(place + os.sep for place in (getattr(find_spec("torch"), "submodule_search_locations", None) or ()))
OURS = str(Path(__file__).parents[2]) + os.sep
PASSES_ON = ("<", OURS, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))


def callers() -> Iterator[str]:
    """Yield the packages whose code leads here, innermost first; one name for all code between that is not installed.

    Returns:
        Names of packages.
    """
    return (owner for owner, _ in groupby(owner for owner, _ in _frames()))


def site() -> Site | None:
    """The innermost line of the audited code, which is that of the outermost owner; None where none leads here.

    Returns:
        File, line and function, or None.
    """
    every = [*_frames()]
    place = next((k for k, (owner, _) in enumerate(every) if owner == every[-1][0]), None)
    if place is None:
        return None
    frame, through = every[place][1], every[place - 1][0] if place else ""
    return Site(frame.f_code.co_filename, frame.f_lineno, "" if through == "torch" else through)


def line() -> str:
    """`model.py:12`: the innermost line that is neither torch's nor ours.

    Returns:
        `FILE:LINE`, or an empty text.
    """
    frame = next((frame for owner, frame in _frames() if owner != "torch"), None)
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _frames() -> Iterator[tuple[str, FrameType]]:
    """Of code with an owner, innermost first."""
    return ((owner, frame) for frame in under_way() if (owner := _owner(frame.f_code.co_filename)))


def under_way() -> Iterator[FrameType]:
    """Yield the frames of the code under way, innermost first, up to the call of the audited function.

    Yields:
        Frames; the last one has a caller, that call, but in a thread of its own.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != CALL:
        yield frame
        frame = frame.f_back


def is_a_librarys(file: str) -> bool:
    """Whether a file is of a library: Python's, an installed one, or this one.

    Args:
        file: A path, as code names it; `<...>` is of no file.

    Returns:
        True if it is.
    """
    return _owner(file) != UNINSTALLED and not file.startswith("<")


@lru_cache(maxsize=4096)
def _owner(file: str) -> str:
    """The package that a file is of; empty of Python's own and of ours, which pass calls on."""
    if file.startswith(TORCH):
        return "torch"
    installed = None if file.startswith(OURS) else INSTALLED.search(file)
    return installed[1] if installed else "" if file.startswith(PASSES_ON) else UNINSTALLED
