"""The source tree that runs, and its commit."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[3]


@cache
def commit() -> dict[str, str | bool | None]:
    """Name the commit of the source tree that is run.

    It is asked once, when a forkserver starts: its children run the code that was imported then.

    Returns:
        `commit`: the SHA of HEAD, and `clean`: whether nothing differs from it. Both are None where the package is not in a
        checkout of its own.
    """
    try:
        top, head = _git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        if Path(top) == SOURCE:  # and not the repository of a project that has the package installed inside it
            return {"commit": head, "clean": not _git("status", "--porcelain")}
    except (OSError, subprocess.SubprocessError, ValueError):
        pass
    return {"commit": None, "clean": None}


def _git(*arguments: str) -> str:
    """What git says of the source tree, without writing to it."""
    done = subprocess.run(
        ["git", *arguments],
        cwd=SOURCE,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return done.stdout.strip()
