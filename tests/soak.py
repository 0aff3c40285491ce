"""A sweep whose processes are killed again and again, and resumed to its end, is bit by bit the one that nobody disturbed.

`python -m tests.soak [--trials 300] [--kills 100] [--seed 0] [--computing]`: trials take no time (`tests/sweep/tiny_trials.py`),
or compute, as short as they can be; SIGKILL, SIGTERM and SIGINT go to a child, the forkserver, the command or all. Exit code 1
names what was lost, altered, repeated or left running; exit code 3 says why the campaign could not start.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from accumulation_harness.results.store import State, Store

PROGRAM = Path(__file__).parent / "sweep" / "tiny_trials.py"
MOST_SECONDS = 10  # between the end of the command and that of all it has started
PRELOAD = "pandas,pyarrow.parquet,accumulation_harness.sweep.experiment"  # by the forkserver, once: a trial took 1.5 s to import
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


COMPUTING = ("steps=3", "algebra_steps=2", "probe_every=2", "accumulation_steps=[2,8]", "tracking=disabled")
OF_A_RUN = re.compile(rb'"(sha256|seconds|folder)": [^\n]*')  # of a record, the only lines that differ between two runs
NAME = "SOAKED"  # of the variable by which the processes of a sweep are known


def start(folder, trials, computing):
    environment = {"TINY_KINDS": ",".join(["rows"] * trials), "TINY_DIR": str(folder), "TINY_PRELOAD": PRELOAD, NAME: str(folder)}
    paths = (PROGRAM.parent, PROGRAM.parents[2], PROGRAM.parents[2] / "harness")
    seeds = ",".join(map(str, range(trials)))
    program = ["-m", "accumulation_harness", "run", *COMPUTING] if computing else [str(PROGRAM)]
    return subprocess.Popen(
        [sys.executable, *program, "-m", f"seed={seeds}", "workers=2", f"results={folder}/results"],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=folder,
    )


def content(folder):
    """Every finished trial, byte by byte but for where it ran, and how long."""
    trials = [one.folder for one in Store(folder / "results").status() if one.state == State.finished]
    return {trial.name: {path.name: OF_A_RUN.sub(b"", path.read_bytes()) for path in trial.iterdir()} for trial in trials}


def records(folder):
    """Every finished trial, with what changes when it is written again."""
    return {path.parent.name: path.stat().st_ino for path in folder.glob("results/*/*/trial.json")}


def strike(command, generator):
    """A signal to one of the command's processes, or to all."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        below = psutil.Process(command.pid).children(recursive=True)
        chosen = generator.choice([[command.pid], [one.pid for one in below[:1]], [one.pid for one in below[-1:]],
                                   [command.pid, *(one.pid for one in below)]])  # fmt: skip
        number = generator.choice(SIGNALS)
        for process in chosen:
            os.kill(process, number)


def of_sweep(folder):
    """Processes of the sweep that are left."""
    found = psutil.process_iter(["environ", "status"])
    own = [one for one in found if (one.info["environ"] or {}).get(NAME) == str(folder)]
    return [one.pid for one in own if one.info["status"] != psutil.STATUS_ZOMBIE]


def soak(folder, trials, kills, generator, computing):
    """How many signals were sent, how often the sweep was started, and what was wrong."""
    sent = starts = 0
    wrong, seen = [], {}
    while starts == 0 or len(content(folder)) < trials:
        command, starts = start(folder, trials, computing), starts + 1
        if starts > kills + 20:
            return sent, starts, ["it does not come to its end"]
        while command.poll() is None:
            time.sleep(generator.uniform(0, 0.6))
            found = records(folder)
            wrong += [f"{name} is made again" for name in seen if found.get(name) != seen[name]]
            seen = found
            if sent < kills and len(seen) * kills >= sent * trials:  # spread over the sweep
                strike(command, generator)
                sent += 1
        deadline = time.monotonic() + MOST_SECONDS
        while (alive := of_sweep(folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        wrong += [f"process {process} runs on after start {starts}" for process in alive]
    return sent, starts, wrong


def campaign(trials, kills, seed, computing=False):
    """Counts, and what was wrong in words; None where nothing could be started."""
    with tempfile.TemporaryDirectory() as scratch:
        calm, struck = Path(scratch, "calm"), Path(scratch, "struck")
        for folder in (calm, struck):
            folder.mkdir()
        if start(calm, trials, computing).wait() != 0 or len(expected := content(calm)) != trials:
            return None
        sent, starts, wrong = soak(struck, trials, kills, random.Random(seed), computing)
        found = content(struck)
        wrong += [f"{name} is lost" for name in expected if name not in found]
        wrong += [f"{name} is another" for name in expected if name in found and found[name] != expected[name]]
        return f"{trials} trials, {sent} signals, {starts} starts", wrong


def main(arguments=None):
    """The exit code."""
    parser = argparse.ArgumentParser()
    for name, number in (("trials", 300), ("kills", 100), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--computing", action="store_true")
    options = parser.parse_args(arguments)
    if (answer := campaign(options.trials, options.kills, options.seed, options.computing)) is None:
        print("cannot start: the sweep does not come to its end undisturbed", file=sys.stderr)
        return 3
    counts, wrong = answer
    print(f"{counts}: {'; '.join(wrong) or 'bit by bit the undisturbed sweep'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
