"""The processes of one case, found by its folder in their environment or their arguments, whoever their parents are."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.campaign import ROOT, Broken

SETTLE_SECONDS = 3.0  # in which what a killed command has started must be gone


@dataclass(frozen=True)
class Process:
    """One that is alive."""

    pid: int
    arguments: str
    stopped: bool

    @property
    def role(self) -> str:
        """What it is for, as far as its arguments tell."""
        roles = {"keeper.py": "keeper", "forkserver": "forkserver or child", "wandb-core": "wandb", "spawn_main": "spawned",
                 "resource_tracker": "tracker", "-m harness": "command", "-m analysis": "command"}  # fmt: skip
        return next((role for mark, role in roles.items() if mark in self.arguments), "other")


def surroundings(folder: Path) -> Mapping[str, str]:
    """The environment of a command whose processes can be found by `folder`, with a temporary folder of its own in there."""
    (folder / "tmp").mkdir(exist_ok=True)
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT}/harness",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"),
        "CASE": str(folder),
    }


def alive(folder: Path) -> Iterator[Process]:
    """Every process of the case; zombies are none."""
    mark = os.fsencode(folder)
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(entry.name)
            arguments = (entry / "cmdline").read_bytes()
            if pid != os.getpid() and mark in (entry / "environ").read_bytes() + arguments:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                yield Process(pid, arguments.replace(b"\0", b" ").decode(errors="replace"), state == "T")


def check_nothing_is_left(folder: Path, seconds: float = SETTLE_SECONDS) -> None:
    """Raise `Broken` where processes or temporary files are still there after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := list(alive(folder))) or os.listdir(folder / "tmp"):
        if time.monotonic() > deadline:
            names = [f"{process.role} {process.arguments[:150]}" for process in left]
            raise Broken(f"left behind: {names}, temporary files {os.listdir(folder / 'tmp')}")
        time.sleep(0.02)
