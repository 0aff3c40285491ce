"""Sweeps, reports and statuses at the same moment on one store, while somebody deletes folders of it.

None of them breaks or waits for ever. Where nothing is deleted no trial runs twice; where something is, the next sweep makes the
store whole.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from accumulation_harness.results.store import Store
from tests.chaos.campaign import Broken, ask, prepared
from tests.chaos.campaigns.kills import GRID, table, undisturbed
from tests.chaos.processes import check_nothing_is_left, surroundings

START_SECONDS = 60.0  # for imports, before all begin
END_SECONDS = 60.0
TRIALS = 8


def attack(rng: Random, folder: Path) -> str:
    """Two to four commands of one store."""
    kinds = [rng.choice(("sweep", "sweep", "status", "report")) for _ in range(rng.randint(2, 4))]
    deletes = rng.random() < 0.5
    store, env = folder / "results", dict(surroundings(folder))
    env |= {"REPLAYED": str(replayed()), "JOURNAL": str(folder / "journal"), "READY": str(folder / "ready")}
    env |= {"GO": str(folder / "go")}
    (folder / "ready").mkdir()
    if rng.random() < 0.5:
        shutil.copytree(undisturbed()[0], store)
    commands = {
        "sweep": ["-m", *GRID.arguments[2:-3], f"seed=range({TRIALS})", "workers=2", "results=results"],
        "status": ["--results=results"],
        "report": ["--results=results", "--out=reports"],
    }
    started = []
    for number, kind in enumerate(kinds):
        with open(folder / f"output-{number}", "wb") as output:
            arguments = [sys.executable, "-m", "tests.chaos.at_once", kind, *commands[kind]]
            started.append(
                subprocess.Popen(arguments, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )
    try:
        _begin(folder, len(started))
        _wait(rng, started, store if deletes else None)
        for number, process in enumerate(started):
            told = (folder / f"output-{number}").read_text(errors="replace")
            if "Traceback (most recent call last)" in told or process.returncode not in (0, 1):
                raise Broken(f"{kinds}, deleting: {deletes}: {kinds[number]} ended with {process.returncode}:\n{told[-3000:]}")
            if kinds[number] == "sweep" and process.returncode and not deletes:
                raise Broken(f"{kinds}: a sweep failed though nothing was deleted:\n{told[-3000:]}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    _check_whole(folder, store, commands, env, deletes)
    return f"{'+'.join(sorted(kinds))}{', folders deleted' * deletes}"


def _begin(folder: Path, commands: int) -> None:
    """Let all go on at once."""
    deadline = time.monotonic() + START_SECONDS
    while len(list((folder / "ready").iterdir())) < commands and time.monotonic() < deadline:
        time.sleep(0.01)
    (folder / "go").touch()


def _wait(rng: Random, started: list[subprocess.Popen[bytes]], deleted: Path | None) -> None:
    """Until all have ended; folders of the store `deleted` go meanwhile."""
    deadline = time.monotonic() + END_SECONDS
    while any(process.poll() is None for process in started):
        if time.monotonic() > deadline:
            raise Broken(f"no end within {END_SECONDS:g} s: {[process.args for process in started if process.poll() is None]}")
        if deleted is not None and (folders := [*deleted.glob("*/*"), *deleted.glob("*"), *deleted.glob(".sweeps")]):
            shutil.rmtree(rng.choice(folders), ignore_errors=True)
        time.sleep(rng.uniform(0, 0.1))


def _check_whole(folder: Path, store: Path, commands: dict[str, list[str]], env: dict[str, str], deletes: bool) -> None:
    """A sweep that nobody disturbs completes the store; its report can be made; nothing lies about."""
    journal = folder / "journal"
    if not deletes and journal.exists():
        again = [name for name, times in Counter(journal.read_text().split()).items() if times > 1]
        if again:
            raise Broken(f"trials that ran more than once: {again}")
    for kind in ("sweep", "report", "status"):
        ask([sys.executable, "-m", "tests.chaos.at_once", kind, *commands[kind]], folder=folder, env=env, codes=(0,))
    seeds = sorted(trial.config["seed"] for trial in Store(store).trials())
    if seeds != list(range(TRIALS)):
        raise Broken(f"expected the trials of seeds 0 to {TRIALS - 1}, got {seeds}")
    if table(store).count(b"\n") != 1 + 2 * TRIALS:
        raise Broken("verdicts.csv has not two arms for each trial")
    if partial := [*store.rglob("*.partial"), *(folder / "reports").rglob("*.partial")]:
        raise Broken(f"left behind: {partial}")
    check_nothing_is_left(folder)


@prepared
def replayed() -> Path:
    """A store of one trial."""
    folder = Path(tempfile.mkdtemp(dir=undisturbed()[0].parent))
    [first, *_] = Store(undisturbed()[0]).trials()
    shutil.copytree(first.folder, folder / first.experiment / first.trial)
    return folder
