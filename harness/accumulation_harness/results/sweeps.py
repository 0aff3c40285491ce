"""What a sweep was asked to run: `<root>/.sweeps/<name>.json`, so that another process can tell how much is left.

The file is a note for whoever watches. Nothing depends on it: which trials are finished is in the store.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accumulation_harness.results.record import FOLDER_MODE, read_file, write_atomically

FOLDER = ".sweeps"


@dataclass(frozen=True)
class Sweep:
    """The trials that one command asked for, as `experiment/trial`, and when it (last) started."""

    trials: tuple[str, ...]
    started: float  # seconds since the epoch


def announce(root: Path, trials: Sequence[str]) -> None:
    """Write down the trials of a sweep that starts now; the same trials again replace their own note.

    There is none where it cannot be written, as when somebody deletes the folder at this moment, or has a link in its place.
    """
    folder = root / FOLDER
    name = hashlib.sha256("\n".join(sorted(trials)).encode()).hexdigest()[:16]
    content = {"trials": list(trials), "started": time.time()}
    with suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
        folder.mkdir(FOLDER_MODE, exist_ok=True)
        if not folder.is_symlink():
            write_atomically(folder / f"{name}.json", (json.dumps(content) + "\n").encode())


def announced(root: Path) -> list[Sweep]:
    """Every sweep's note, oldest first; one that cannot be read is left out."""
    found = []
    try:
        names = os.listdir(root / FOLDER)
    except OSError:
        return []
    for name in names:
        if not name.endswith(".json"):
            continue
        try:
            content = json.loads(read_file(root / FOLDER / name))
            sweep = Sweep(tuple(map(str, content["trials"])), float(content["started"]))
            if math.isfinite(sweep.started):
                found.append(sweep)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return sorted(found, key=lambda sweep: sweep.started)
