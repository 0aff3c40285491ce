"""Audit a released trainer in an environment of its own, and write `records/NAME.json`: `make trainer NAME=trl`.

With names of functions behind it, those alone: the record keeps the others, whose arms then say when they were run.

    {"name", "framework", "versions": {package: version}, "settings": {"batch_size", "accumulation_steps", "processes"},
     "run": {"date", "commit"},
     "arms": [{"function", "accumulation_steps", "arithmetic", "verdict", "causes", "distance", "scale", "gate",
               "largest_distance", "steps", "reference_steps"}],
     "findings": [{"function", "accumulation_steps", "optimizer_step", "cause", "detail"}],
     "problems": [{"function", "detail"}]}

`distance`, `scale` and `gate` are those of the first optimizer step's gradient; numbers that are not finite are null.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import subprocess
import sys
import venv
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomllib

if TYPE_CHECKING:
    from accumulation_harness.audit.report import ArmResult, Report

HERE = Path(__file__).parent
ROOT = HERE.parent
USUAL = {"batch_size": 16, "accumulation_steps": [4, 16], "processes": 1}


def main(name: str, *only: str) -> int:
    """Make the environment where it is not there, and audit in it: all of its functions, or `only` these."""
    known = tomllib.loads((HERE / "trainers.toml").read_text())
    if name not in known:
        print(f"NAME={name}: expected one of {', '.join(known)}", file=sys.stderr)
        return 2
    python = environment(known[name])
    if Path(sys.executable) == python:
        path = HERE / "records" / f"{name}.json"
        made = audited(name, known[name] | ({"functions": only} if only else {}))
        if only and path.exists():
            made = joined(json.loads(path.read_text()), made, known[name]["functions"])
        path.write_text(json.dumps(made, indent=1, allow_nan=False) + "\n")
        return 0
    searched = {"PYTHONPATH": f"{ROOT / 'harness'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([python, "-W", "ignore", __file__, name, *only], env={**os.environ, **searched}, check=False).returncode


def environment(asked: dict[str, Any]) -> Path:
    """The interpreter of an entry; what is not there yet is installed: the pins of its file, or its own above those of torch."""
    own = asked.get("pins", [])
    folder = ROOT / ".venv-trainers" / ("_".join(own).replace("==", "-") or asked["environment"])
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        venv.create(folder, clear=True)
        wanted = own or ["-r", HERE / "requirements" / f"{asked['environment']}.txt"]
        if own:
            base = next(environment({"environment": "torch"}).parents[1].glob("lib/python*/site-packages"))
            (next(folder.glob("lib/python*/site-packages")) / "base.pth").write_text(f"{base}\n")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *asked.get("options", [])]
        subprocess.run([*pip, *wanted], check=True)
        ready.touch()
    return python


def audited(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What the audits of all its functions say."""
    from accumulation_harness.audit import audit

    module, sizes = importlib.import_module(f"scoreboard.{asked['file']}"), USUAL | asked.get("sizes", {})
    packages = asked.get("packages") or [*(pin.partition("==")[0] for pin in asked["pins"]), "torch"]
    versions = {package: version(package) for package in packages} | {"python": platform.python_version()}
    asked_git = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False)
    run = {"date": date.today().isoformat(), "commit": asked_git.stdout.strip()}
    shared = {"name": name, "framework": packages[0], "versions": versions, "settings": sizes, "run": run}
    parts = []
    for function in asked["functions"]:
        report = audit(getattr(module, function), **sizes)
        print(report, flush=True)
        parts.append(part_of(getattr(module, function), report))
    return shared | {key: [row for part in parts for row in part[key]] for key in ("arms", "findings", "problems")}


def joined(old: dict[str, Any], new: dict[str, Any], functions: list[str]) -> dict[str, Any]:
    """A record with what is new of it; the rest is kept where it was made with the same versions."""
    again = {row["function"] for key in ("arms", "problems") for row in new[key]}
    kept = old if old["versions"] == new["versions"] else {"arms": [], "findings": [], "problems": []}
    for arm in kept["arms"]:
        arm.setdefault("run", old.get("run"))
    rows = {
        key: [row for row in kept[key] if row["function"] not in again] + new[key] for key in ("arms", "findings", "problems")
    }
    return new | {key: sorted(each, key=lambda row: functions.index(row["function"])) for key, each in rows.items()}


def part_of(train: Callable[..., Any], report: Report) -> dict[str, list[dict[str, Any]]]:
    """What a record has of one function."""
    function = {"function": train.__name__}
    findings = [
        {"accumulation_steps": f.accumulation_steps, "optimizer_step": f.optimizer_step, "cause": f.cause, "detail": f.message}
        for f in report.findings
    ]
    return {
        "arms": [function | _arm(result) for result in report.results],
        "findings": [function | finding for finding in findings],
        "problems": [function | {"detail": problem} for problem in report.problems],
    }


def _arm(result: ArmResult) -> dict[str, Any]:
    steps, runs = [step for item in result.facts for step in item.steps], [item.run for item in result.facts]
    first = steps[0] if steps else None
    return {
        "accumulation_steps": result.accumulation_steps,
        "arithmetic": result.arithmetic,
        "verdict": "different" if result.findings else "equivalent",
        "causes": sorted({f.cause for f in result.findings}),
        "distance": _number(first.raw.distance) if first else None,
        "scale": _number(first.raw.scale) if first else None,
        "gate": _number(first.gate) if first else None,
        "largest_distance": _number(max((step.raw.distance for step in steps), default=math.nan)),
        "steps": sum(run.mine.steps for run in runs),
        "reference_steps": sum(run.reference.steps for run in runs),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or [""]))
