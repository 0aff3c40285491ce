"""What was found in released software, as JSON: one file per audited trainer, one entry per function and arm.

    {"name", "framework", "versions": {package: version}, "settings": {"batch_size", "accumulation_steps", "processes"},
     "arms": [{"function", "setting", "accumulation_steps", "arithmetic", "verdict", "causes", "distance", "scale", "gate",
               "largest_distance", "steps", "reference_steps"}],
     "findings": [{"function", "accumulation_steps", "optimizer_step", "cause", "detail"}],
     "problems": [{"function", "detail"}]}

`distance`, `scale` and `gate` are those of the first optimizer step's gradient; numbers that are not finite are null.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accumulation_harness.audit.report import ArmResult, Report
from accumulation_harness.results.record import write_atomically

KEYED = ("arms", "findings", "problems")  # lists whose entries carry the function they belong to


def record(
    path: Path, train: Callable[..., Any], report: Report, *, packages: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the report of one function into the file of its trainer, in place of what it held of that function.

    The first of `packages` is the framework audited. Raises ValueError when the file holds other versions or settings.
    """
    function = train.__name__
    entry = _entry(path.stem, packages, settings)
    if path.is_file():
        held = _held(path)
        off = [key for key in ("framework", "versions", "settings") if held[key] != entry[key]]
        if off:
            raise ValueError(
                f"expected {path} to hold the same {', '.join(off)}, got {[held[key] for key in off]}: remove it first"
            )
        entry |= {key: [item for item in held[key] if item["function"] != function] for key in KEYED}
    entry["arms"] += [_arm(train, result) for result in report.results]
    entry["findings"] += [
        {
            "function": function,
            "accumulation_steps": f.accumulation_steps,
            "optimizer_step": f.optimizer_step,
            "cause": f.cause,
            "detail": f.message,
        }
        for f in report.findings
    ]
    entry["problems"] += [{"function": function, "detail": problem} for problem in report.problems]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(entry, indent=1, allow_nan=False) + "\n").encode())
    return entry


def _held(path: Path) -> dict[str, Any]:
    """What the file of a trainer holds. Raises ValueError when that is no such record."""
    try:
        held: dict[str, Any] = json.loads(path.read_bytes())
        functions = [item["function"] for key in KEYED for item in held[key]]
        is_record = (
            all(isinstance(name, str) for name in (*functions, held["framework"])) and {"versions", "settings"} < held.keys()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        is_record = False
    if not is_record:
        raise ValueError(f"expected {path} to be the record of a released trainer, got something else")
    return held


def _entry(name: str, packages: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    try:
        versions = {package: importlib.metadata.version(package) for package in packages} | {"python": platform.python_version()}
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise ValueError(f"expected packages that are installed, got {', '.join(packages)} ({error})") from error
    return {"name": name, "framework": packages[0], "versions": versions, "settings": json.loads(json.dumps(settings))} | {
        key: [] for key in KEYED
    }


def _arm(train: Callable[..., Any], result: ArmResult) -> dict[str, Any]:
    steps = [step for item in result.facts for step in item.steps]
    first = next(iter(steps), None)
    runs = [item.run for item in result.facts]
    return {
        "function": train.__name__,
        "setting": (inspect.getdoc(train) or train.__name__.replace("_", " ")).partition("\n")[0],
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
