"""`make gpu`: all that a CUDA machine can show, stage by stage; each runs whatever became of the one before.

What a stage prints is written as it comes; `summary.json` and the archive that holds it all are written anew after each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accumulation_harness.doctor import machine

MACHINE = "machine.json"
PATIENCE_SECONDS = 5.0
TAIL = 20  # lines of a failed stage's output that are in the summary


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A command, the exit codes that are no failure of it, and how long it may take."""

    name: str
    command: Sequence[str]
    accepted: Sequence[int] = (0,)
    seconds: float = 600.0


def doctor(out: Path) -> Stage:
    """The first stage, which needs to know nothing of the machine; it writes what it finds to `machine.json`."""
    command = [sys.executable, "-m", "accumulation_harness.doctor", "--json", f"{out / MACHINE}"]
    return Stage(name="doctor", command=command, seconds=90)


def found_by_doctor(out: Path) -> dict[str, Any]:
    """What the first stage has written; empty where it did not come to that."""
    try:
        found: dict[str, Any] = json.loads((out / MACHINE).read_text())
    except (OSError, ValueError):
        return {}
    return found


def on_a_gpu(out: Path, facts: Mapping[str, Any]) -> list[Stage]:
    """The other stages: where float64 is slow, a narrower ResNet and fewer float64 steps; all together less than half an hour.

    What a stage that is stopped has found until then is in its log, and the sweep's finished trials are stored.
    """
    python, trials = [sys.executable, "-m"], trials_of(out)
    smaller = ["algebra_steps=5", "workload.width=2"] if machine.is_slow(facts) else []
    operations = [*python, "accumulation_harness.doctor", "operations", "--json", f"{out / 'operations.json'}"]
    tests = [*python, "pytest", "-v", "-m", "gpu", "tests", f"--junitxml={out / 'tests.xml'}"]
    sweep = [*python, "accumulation_harness", "run", "+experiment=gpu", f"results={trials}", *smaller]
    bench = [*python, "accumulation_harness.bench", "overhead", "by_hand", "--out", f"{out / 'bench.json'}"]
    return [
        Stage(name="operations", command=operations, seconds=90),
        Stage(name="tests", command=tests, seconds=480),
        Stage(name="sweep", command=sweep, seconds=640),
        Stage(
            name="summary",
            command=[*python, "accumulation_harness.analysis.summary", "--results", f"{trials}", "--out", f"{out}"],
            seconds=60,
        ),
        Stage(name="bench", command=bench, seconds=420),
    ]


def trials_of(out: Path) -> Path:
    """Where the sweep's trials are stored: beside the folder that is sent."""
    return out.parent / f"{out.name}-trials"


class Work:
    """Stages, one after the other, whatever becomes of them; after each the summary and the archive are written anew."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.archive = out.parent / f"{out.name}.tar.gz"
        self.rows: list[dict[str, Any]] = []
        out.mkdir(parents=True, exist_ok=True)
        (out / MACHINE).unlink(missing_ok=True)  # of an earlier run, perhaps of another machine

    @property
    def code(self) -> int:
        """1 where a stage failed, else 0."""
        return 0 if all(row["ok"] for row in self.rows) else 1

    def run(self, stage: Stage) -> None:
        """Run one; what it prints is in its log as it comes."""
        print(f"{stage.name}: {' '.join(stage.command)}", flush=True)
        self.rows.append(run(stage, self.out / f"{stage.name}.log"))
        print(f"{stage.name}: {'ok' if self.rows[-1]['ok'] else 'FAILED'} after {self.rows[-1]['seconds']:.0f} s", flush=True)
        summary = {"stages": self.rows, "failed_trials": failed_trials(trials_of(self.out))}
        (self.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        unfinished = self.archive.with_suffix(".part")
        with tarfile.open(unfinished, "w:gz") as file:
            file.add(self.out, arcname=self.out.name)
        unfinished.replace(self.archive)  # whole, whenever this process is killed


def run(stage: Stage, log: Path) -> dict[str, Any]:
    """One stage, its output in `log`; a command that cannot be started or takes too long has failed, and what it started ends."""
    started, code = time.monotonic(), None
    with log.open("w") as file:
        try:
            process = subprocess.Popen(stage.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(stage.seconds)
            except subprocess.TimeoutExpired:
                file.write(f"\nstopped after {stage.seconds:.0f} s\n")
            finally:
                with suppress(ProcessLookupError):  # nobody of its group is left, as usual
                    os.killpg(process.pid, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # a process that hangs in a driver cannot be killed
                    process.wait(PATIENCE_SECONDS)
        except OSError as error:
            file.write(f"\nnot started: {error}\n")
    ok = code in stage.accepted
    tail = [] if ok else log.read_text(errors="replace").splitlines()[-TAIL:]
    return {"stage": stage.name, "ok": ok, "exit": code, "seconds": time.monotonic() - started, "tail": tail}


def failed_trials(trials: Path) -> dict[str, str]:
    """The last line of the error of each trial that failed, by the trial's folder."""
    found = {}
    for path in sorted(trials.rglob("failed.json")):
        try:
            told = str(json.loads(path.read_text())["error"])
        except (ValueError, KeyError, OSError) as error:
            told = f"failed.json cannot be read: {error}"
        found[f"{path.parent.relative_to(trials)}"] = next(reversed(told.strip().splitlines()), "")
    return found
