"""What a campaign is: one attack, drawn from a seed and tried again and again, and what must never come of it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from random import Random
from typing import TypeVar

ROOT = Path(__file__).parents[2]  # of the source tree
Made = TypeVar("Made")
Attack = Callable[[Random, Path], str]  # (source of every draw, an empty folder) -> what came of it, in a few words


class Broken(AssertionError):
    """What must not happen: a traceback, an endless wait, a process left over, a result lost, repeated, wrong or blamed."""


class CannotStart(RuntimeError):
    """What a campaign needs before its first attack could not be made: nothing was attacked, and nothing was found."""


def prepared(make: Callable[[], Made]) -> Callable[[], Made]:
    """What `make` gives, made once in a process. Raises `CannotStart` where it cannot be made."""

    @cache
    @wraps(make)
    def made() -> Made:
        try:
            return make()
        except Exception as error:
            raise CannotStart(f"{make.__name__}: {error}") from error

    return made


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str


def ask(
    command: Sequence[str],
    *,
    folder: Path,
    seconds: float = 120,
    env: Mapping[str, str] | None = None,
    codes: Sequence[int] = (0, 1, 2),
) -> Answer:
    """Run a command in `folder` with the tree's modules at hand; its whole process group is killed after `seconds`.

    Raises `Broken` where it does not end by itself, ends with another code than `codes`, or shows a traceback.
    """
    surroundings = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/harness", "OMP_NUM_THREADS": "1", **(env or {})}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=surroundings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Broken(f"no end within {seconds:g} s: {' '.join(command)}") from None
    if "Traceback (most recent call last)" in out + err:
        raise Broken(f"a traceback: {' '.join(command)}\n{(out + err)[-2000:]}")
    if process.returncode not in codes:
        raise Broken(f"exit code {process.returncode}: {' '.join(command)}\n{(out + err)[-2000:]}")
    return Answer(process.returncode, out, err)
