"""Damage, special files and links anywhere in a store: tables are those of the undamaged one, or what is damaged is named."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pandas as pd

from accumulation_harness.analysis import load
from accumulation_harness.results import sweeps
from accumulation_harness.results.tracking import TrackingWarning
from tests.chaos.campaign import Broken, ask, prepared
from tests.chaos.reports import Said, reported, status_of
from tests.chaos.whole_store import FAULTS, LOSSES
from tests.stored_trials import store_trial

REAL = ("steps=6", "algebra_steps=6", "effective_batch=8", "accumulation_steps=[2]", "tracking=offline")
FOLDER_NAMES = (".lock", ".sweeps", "lock", "trial.json", "steps.parquet", "config.json", "failed.json", "wandb", "other")


@prepared
def undamaged() -> tuple[Path, Said, tuple[pd.DataFrame, ...]]:
    """A store of four trials, one of them real and mirrored to W&B; its report; and what W&B's log says. Made once."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-store-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    results = folder / "results"
    ask(
        [sys.executable, "-m", "accumulation_harness", "run", *REAL, f"results={results}"], folder=folder, seconds=600, codes=(0,)
    )
    for norm in ("none", "batch"):
        store_trial(results, norm=norm)
    store_trial(results, experiment="fault_matrix", faults=FAULTS, losses=LOSSES)
    sweeps.announce(results, ["equivalence/x"])
    return results, reported(results, folder / "reports"), mirrored(results)[0]


def attack(rng: Random, folder: Path) -> str:
    """Copy the store, damage it, and ask status, report and W&B's log."""
    whole, expected, logged = undamaged()
    results, outside = folder / "results", folder / "outside"
    shutil.copytree(whole, results, symlinks=True)
    outside.mkdir()
    (outside / "mine").write_text("mine")
    kind = rng.choice((flipped, cut, swapped, zeroed, special, special, odd))
    path = kind(rng, results, outside)
    where = path.relative_to(results)
    status, said = status_of(results), reported(results, folder / "reports")
    if sorted(path.name for path in outside.iterdir()) != ["mine"] or (outside / "mine").read_text() != "mine":
        raise Broken(f"{kind.__name__} {where}: written outside of the store")
    told = (status.text + said.text + said.page).replace("\\\\", "\\")
    name = where.parts[min(1, len(where.parts) - 1)]
    is_named = name in told or f"{where.parts[0]} holds no trial" in told
    if said.tables != expected.tables and not is_named:
        raise Broken(f"{kind.__name__} {where}: tables differ, and nobody says why")
    if path.name == "steps.parquet" and not is_named:
        raise Broken(f"{kind.__name__} {where}: not named")
    if path.suffix == ".wandb":
        found, warned = mirrored(results)
        if not warned and not all(map(pd.DataFrame.equals, found, logged)):
            raise Broken(f"{kind.__name__} {where}: W&B's log is read with other numbers")
        return f"{kind.__name__} log: {'refused' if warned else 'the same numbers'}"
    return f"{kind.__name__}: {'named' if is_named and name not in expected.page else 'the same tables'}"


def mirrored(results: Path) -> tuple[tuple[pd.DataFrame, ...], bool]:
    """What is read from the W&B logs, and whether a log was refused."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", TrackingWarning)
        frames = load.from_wandb(results), load.steps_from_wandb(results)
    return frames, any(issubclass(warning.category, TrackingWarning) for warning in seen)


def a_file(rng: Random, results: Path) -> Path:
    """A file of the store, each kind as often as the others."""
    files = sorted(path for path in results.rglob("*") if path.is_file() and not path.is_symlink())
    kind = rng.choice(sorted({path.suffix + path.name[:1] for path in files}))
    return rng.choice([path for path in files if path.suffix + path.name[:1] == kind])


def damaged(change: Callable[[Random, bytearray], bytes | bytearray]) -> Callable[[Random, Path, Path], Path]:
    """An attack that rewrites a file otherwise."""

    def damage(rng: Random, results: Path, outside: Path) -> Path:
        content = b""
        while not content:
            path = a_file(rng, results)
            content = path.read_bytes()
        while (new := bytes(change(rng, bytearray(content)))) == content:
            pass
        path.write_bytes(new)
        return path

    damage.__name__ = change.__name__.strip("_")
    return damage


def part(rng: Random, content: bytearray) -> slice:
    """Some of its bytes."""
    start = rng.randrange(len(content))
    return slice(start, start + rng.choice((1, 7, 100, 32768, len(content))))


@damaged
def flipped(rng: Random, content: bytearray) -> bytearray:
    """A few bits."""
    for _ in range(rng.choice((1, 1, 3, 50))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


@damaged
def cut(rng: Random, content: bytearray) -> bytearray:
    """Without a part of it, at its end or in the middle."""
    del content[part(rng, content) if rng.random() < 0.5 else slice(rng.randrange(len(content)), None)]
    return content


@damaged
def swapped(rng: Random, content: bytearray) -> bytes:
    """One part in another's place, or twice."""
    if len(content) == 1:
        return b""
    taken = part(rng, content)
    piece = bytes(content[taken])
    if rng.random() < 0.5:
        del content[taken]
    place = rng.randrange(len(content) + 1)
    return bytes(content[:place]) + piece + bytes(content[place:])


@damaged
def zeroed(rng: Random, content: bytearray) -> bytearray:
    """Zeros in place of a part, as a disk leaves them."""
    taken = part(rng, content)
    content[taken] = bytes(len(content[taken]) or 1)
    return content


def special(rng: Random, results: Path, outside: Path) -> Path:
    """Something else in the place of a file or folder of the store."""
    path = rng.choice([*sorted(path for path in results.rglob("*") if "wandb" not in path.parts), a_file(rng, results)])
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    put(rng, path, outside)
    return path


def odd(rng: Random, results: Path, outside: Path) -> Path:
    """Something else beside what is there, or in its place."""
    folder = rng.choice([results, *(path for path in sorted(results.rglob("*")) if path.is_dir() and "wandb" not in path.parts)])
    path = folder / rng.choice(FOLDER_NAMES)
    with suppress(FileNotFoundError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    put(rng, path, outside)
    return path


def put(rng: Random, path: Path, outside: Path) -> None:
    """A pipe, a socket, a folder, an empty file, or a link to a device, a folder, a file or nothing."""
    match rng.choice(("pipe", "socket", "folder", "file", "/dev/zero", "/dev/full", outside, outside / "mine", outside / "none")):
        case "pipe":
            os.mkfifo(path)
        case "socket":
            here = os.open(path.parent, os.O_RDONLY)
            with socket.socket(socket.AF_UNIX) as server:  # by way of its folder: such addresses are short
                server.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
        case "folder":
            (path / "mine").mkdir(parents=True)
        case "file":
            path.write_bytes(b"")
        case target:
            path.symlink_to(target)
