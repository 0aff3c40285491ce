"""`make gpu`: all that a CUDA machine can show, stage by stage; each runs whatever became of the one before.

What a stage prints is written as it comes; `summary.json` is written anew after each, and one archive holds it all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.doctor import machine

TAIL = 20  # lines of a failed stage's output that are in the summary


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A command, the exit codes that are no failure of it, and how long it may take."""

    name: str
    command: Sequence[str]
    accepted: Sequence[int] = (0,)
    seconds: float = 600.0


def stages(out: Path, facts: Mapping[str, Any]) -> list[Stage]:
    """Those of this machine: where float64 is slow, a narrower ResNet and fewer float64 steps; together less than half an hour.

    What a stage that is stopped has found until then is in its log, and the sweep's finished trials are stored.
    """
    python, trials = [sys.executable, "-m"], trials_of(out)
    smaller = ["algebra_steps=5", "workload.width=2"] if machine.is_slow(dict(facts)) else []
    operations = [*python, "harness.doctor", "operations", "--json", f"{out / 'operations.json'}"]
    tests = [*python, "pytest", "-v", "-m", "gpu", "tests", f"--junitxml={out / 'tests.xml'}"]
    sweep = [*python, "harness", "+experiment=gpu", f"results={trials}", *smaller]
    bench = [*python, "harness.bench", "overhead", "by_hand", "--out", f"{out / 'bench.json'}"]
    return [
        Stage(name="doctor", command=[*python, "harness.doctor", "--json", f"{out / 'machine.json'}"], seconds=60),
        Stage(name="operations", command=operations, seconds=90),
        Stage(name="tests", command=tests, seconds=480),
        Stage(name="sweep", command=sweep, seconds=660),
        Stage(name="summary", command=[*python, "analysis.summary", "--results", f"{trials}", "--out", f"{out}"], seconds=60),
        Stage(name="bench", command=bench, seconds=420),
    ]


def trials_of(out: Path) -> Path:
    """Where the sweep's trials are stored: beside the folder that is sent."""
    return out.parent / f"{out.name}-trials"


def run_all(out: Path, chosen: Sequence[Stage]) -> int:
    """Run every stage, write what became of each, and pack all of it; 1 where one failed, else 0."""
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for stage in chosen:
        print(f"{stage.name}: {' '.join(stage.command)}", flush=True)
        rows.append(run(stage, out / f"{stage.name}.log"))
        print(f"{stage.name}: {'ok' if rows[-1]['ok'] else 'FAILED'} after {rows[-1]['seconds']:.0f} s", flush=True)
        summary = {"stages": rows, "failed_trials": failed_trials(trials_of(out))}
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"everything is in {pack(out)}: please send it, whatever failed")
    return 0 if all(row["ok"] for row in rows) else 1


def run(stage: Stage, log: Path) -> dict[str, Any]:
    """One stage, its output in `log`; a command that cannot be started or takes too long has failed."""
    started, code = time.monotonic(), None
    with log.open("w") as file:
        try:
            code = subprocess.run(stage.command, stdout=file, stderr=subprocess.STDOUT, timeout=stage.seconds).returncode
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {stage.seconds:.0f} s\n")
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


def pack(out: Path) -> Path:
    """All files of the folder in one archive beside it."""
    archive = out.parent / f"{out.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(out, arcname=out.name)
    return archive
