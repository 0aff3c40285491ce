"""What a sweep was asked to run: `<root>/.sweeps/<name>.json`, so that another process can tell how much is left.

The file is a note for whoever watches. Nothing depends on it: which trials are finished is in the store.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accumulation_harness.system.files import make_folders, read_file, write_atomically

FOLDER = ".sweeps"


@dataclass(frozen=True)
class Sweep:
    """The trials of one sweep, as `experiment/trial`, and when it was last started."""

    trials: tuple[str, ...]
    started: float  # seconds since the epoch


def announce(root: Path, trials: Sequence[str]) -> None:
    """Record the trials of a sweep that starts now, so that `status` knows what is still to come.

    If the note cannot be written, there is none.

    Args:
        root: The folder of the store.
        trials: The trials, as `experiment/trial`. The same trials replace their earlier note.
    """
    name = hashlib.sha256("\n".join(sorted(trials)).encode()).hexdigest()[:16]
    with suppress(OSError):
        note = json.dumps({"trials": list(trials), "started": time.time()})
        write_atomically(make_folders(root, FOLDER) / f"{name}.json", note.encode())


def announced(root: Path) -> tuple[list[Sweep], list[str]]:
    """Read the notes of all sweeps.

    Args:
        root: The folder of the store.

    Returns:
        The sweeps, oldest first, and in words which notes cannot be read.
    """
    found, unread = [], []
    try:
        paths = [path for path in (root / FOLDER).iterdir() if path.suffix == ".json"]
    except FileNotFoundError:
        paths = []
    except OSError as error:
        paths, unread = [], [f"{FOLDER}: cannot be read ({error})"]
    for path in paths:
        try:
            content = json.loads(read_file(path))
            found.append(Sweep(tuple(map(str, content["trials"])), float(content["started"])))
        except FileNotFoundError:
            pass  # deleted since
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            unread.append(f"{FOLDER}/{path.name}: cannot be read ({type(error).__name__}: {error})")
    return sorted(found, key=lambda sweep: sweep.started), sorted(unread)
