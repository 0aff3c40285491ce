"""Signals at random moments to random processes of a command.

Afterwards nothing is left of it, it has ended within 10 s of the signal, and a grid is resumed: no finished trial is lost or run
again, and the tables are those of a grid that nobody disturbed.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from accumulation_harness.analysis import load, tables
from tests.chaos.campaign import Broken, ask, prepared
from tests.chaos.processes import alive, check_nothing_is_left, surroundings

END_SECONDS = 10.0  # between a signal and the end of what it was sent to
LONGEST_SECONDS = 120.0  # of a command that goes on after a blow to one of its processes
TRIAL = ("workload=digits_mlp", "workload.width=1", "effective_batch=4", "accumulation_steps=[2]", "steps=1", "algebra_steps=1")
TRAIN = """
import torch
import torch.distributed as dist

def train(batch_size, accumulation_steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = torch.randn(24, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    size = batch_size * accumulation_steps * world
    for step in range(3):
        own = data[step * size : (step + 1) * size].chunk(world)[rank]
        for rows in own.split(batch_size):
            (model(rows).square().mean() / accumulation_steps).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Command:
    """A command, and how long it takes when nobody disturbs it, roughly: blows fall within."""

    arguments: tuple[str, ...]
    seconds: float
    ends: bool = True  # by itself, soon enough to be waited for


GRID = Command(("accumulation_harness", "run", "-m", *TRIAL, "seed=0,1,2", "workers=2", "results=results"), 12.0)
COMMANDS = (
    GRID,
    GRID,
    Command(("accumulation_harness", "run", *TRIAL, "results=results"), 8.0),
    Command(("accumulation_harness", "run", "-m", *TRIAL, "seed=0,1", "hydra/launcher=basic", "results=results"), 12.0),
    Command(("accumulation_harness.measure.plan", "b=auto", "effective_batch=64"), 8.0),
    Command(("accumulation_harness.audit", "train.py:train", "--batch-size=4", "--accumulation-steps=2", "--processes=2"), 10.0),
    Command(("accumulation_harness.analysis.report", "--results={store}"), 6.0),
    Command(("accumulation_harness.sweep.status", "--results={store}"), 0.5),
)


def attack(rng: Random, folder: Path) -> str:
    """One blow, or two, and all that must hold afterwards."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a campaign in the background, or under nohup, hands on that they are ignored
        signal.signal(number, signal.SIG_DFL)
    command = rng.choice(COMMANDS)
    (folder / "train.py").write_text(TRAIN)
    arguments = [sys.executable, "-m", *(text.format(store=undisturbed()[0]) for text in command.arguments)]
    errors = open(folder / "output", "wb")  # noqa: SIM115 # a pipe would be held open by what is left behind
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        env=surroundings(folder),
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        start_new_session=True,
    )
    try:
        # A third of the blows fall while Python imports; it takes 0.05 s to get to our first line.
        time.sleep(rng.choice((rng.uniform(0.05, 0.3), rng.uniform(0.05, command.seconds), rng.uniform(1, command.seconds))))
        what = _strike(rng, process, command, folder)
        check_nothing_is_left(folder)
        _check_output(folder, what)
        if command is GRID:
            _check_resumed(arguments, folder)
    except Broken as broken:
        raise Broken(f"{' '.join(command.arguments)}: {broken}\n{_output(folder)[-3000:]}") from None
    finally:
        errors.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for left in alive(folder):
            with suppress(ProcessLookupError):
                os.kill(left.pid, signal.SIGKILL)
        process.wait()
    return what


def _strike(rng: Random, process: subprocess.Popen[bytes], command: Command, folder: Path) -> str:
    """Send the signal, wait for what must come of it, and say what was done."""
    number = rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGSTOP))
    others = [one for one in alive(folder) if one.pid != process.pid]
    victim = rng.choice(others) if others and command.ends and rng.random() < 0.5 else None
    role = victim.role if victim else rng.choice(("parent", "group"))

    def send(number: int) -> None:
        with suppress(ProcessLookupError):
            if victim is not None:
                os.kill(victim.pid, number)
            elif process.poll() is None:
                (os.killpg if role == "group" else os.kill)(process.pid, number)

    send(number)
    twice = number == signal.SIGINT and rng.random() < 0.5
    if twice:
        time.sleep(rng.uniform(0, 0.5))
        send(number)
    what = f"{signal.Signals(number).name}{' twice' * twice} to {role}"
    if number == signal.SIGSTOP:
        time.sleep(rng.uniform(0, 1))
        last = rng.choice((signal.SIGCONT, signal.SIGTERM, signal.SIGINT, signal.SIGKILL))
        what += f", then {last.name}"
        if last == signal.SIGCONT:
            send(last)
            if not command.ends:
                process.kill()
        else:  # to the parent; one that is stopped itself does not see more than SIGKILL before it goes on
            if victim is None:
                send(signal.SIGCONT)
            with suppress(ProcessLookupError):
                os.kill(process.pid, last)
        is_last = last != signal.SIGCONT or not command.ends
    else:
        is_last = victim is None
    _wait(process, END_SECONDS if is_last else LONGEST_SECONDS, what)
    return what


def _wait(process: subprocess.Popen[bytes], seconds: float, what: str) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise Broken(f"{what}: no end within {seconds:g} s") from None


def _output(folder: Path) -> str:
    return (folder / "output").read_text(errors="replace")


def _check_output(folder: Path, what: str) -> None:
    if "Traceback (most recent call last)" in _output(folder):
        raise Broken(f"{what}: a traceback")


def _finished(results: Path) -> dict[Path, tuple[int, int]]:
    """Every finished trial's record, by what changes when it is written again."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in results.glob("*/*/trial.json")}


def _check_resumed(arguments: Sequence[str], folder: Path) -> None:
    results = folder / "results"
    before = _finished(results)
    answer = ask(arguments, folder=folder, env=surroundings(folder), codes=(0,))
    after = _finished(results)
    if lost := [path for path, mark in before.items() if after.get(path) != mark]:
        raise Broken(f"finished trials were lost or run again: {lost}\n{answer.out}")
    if f"{3 - len(before)} trial" not in answer.out and len(before) < 3:
        raise Broken(f"{len(before)} of 3 trials were finished, and then: {answer.out}{answer.err}")
    if table(results) != undisturbed()[1]:
        raise Broken("the tables differ from those of a grid that nobody disturbed")
    check_nothing_is_left(folder)


def table(results: Path) -> bytes:
    """`verdicts.csv` of a store."""
    return tables.to_csv(tables.verdicts(load.read(results).arms))


@prepared
def undisturbed() -> tuple[Path, bytes]:
    """The store of the grid, run once, and its table."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-undisturbed-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ask([sys.executable, "-m", *GRID.arguments], folder=folder, codes=(0,))
    return folder / "results", table(folder / "results")
