"""Audits of released trainers, read from the JSON that `audit.released` writes: as a frame, and on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from accumulation_harness.analysis.content import Section, Table, Text, number
from accumulation_harness.results.record import in_one_line, read_file
from accumulation_harness.results.store import AUDITS

COLUMNS = (
    *("name", "framework", "version", "versions", "function", "setting", "accumulation_steps", "arithmetic", "verdict", "causes"),
    *("distance", "scale", "gate", "largest_distance", "steps", "reference_steps", "detail", "problem"),
)


def no_audits() -> pd.DataFrame:
    """An empty frame of audits, with all its columns."""
    return pd.DataFrame(columns=list(COLUMNS), dtype=object)


def read_audits(results: Path) -> pd.DataFrame:
    """One row per trainer, function and arm of `results/audits/*.json`; `causes` and `detail` are joined with "; ".

    A function that could not be run has one row with the verdict `not run` and its `problem`. Raises ValueError for a file
    that is not such a record.
    """
    frame, damaged = readable(results)
    for problem in damaged.values():
        raise ValueError(problem)
    return frame


def readable(results: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """The rows of `read_audits` from the files that are such records, and by its name why another file is none."""
    rows: list[dict[str, object]] = []
    damaged: dict[str, str] = {}
    for path in sorted((Path(results) / AUDITS).glob("*.json")):
        try:
            rows += _rows(path)
        except ValueError as error:
            damaged[path.name] = in_one_line(str(error))
    return pd.DataFrame(rows, columns=list(COLUMNS)), damaged


def _rows(path: Path) -> list[dict[str, object]]:
    try:
        held = json.loads(read_file(path))
        shared = {
            "name": held["name"],
            "framework": held["framework"],
            "version": held["versions"][held["framework"]],
            "versions": ", ".join(f"{package} {version}" for package, version in held["versions"].items()),
        }
        rows = [_arm(arm, held["findings"]) | shared for arm in held["arms"]]
        for problem in held["problems"]:
            known = [row for row in rows if row["function"] == problem["function"]]
            for row in known:
                row["problem"] = problem["detail"]
            if not known:
                rows.append({**shared, "function": problem["function"], "verdict": "not run", "problem": problem["detail"]})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected the record of an audit in {path}, got {type(error).__name__}: {error}") from error
    return rows


def _arm(arm: dict[str, object], findings: list[dict[str, object]]) -> dict[str, object]:
    own = ("function", "accumulation_steps")
    said = [f for f in findings if all(f[key] == arm[key] for key in own)]
    causes = arm["causes"]
    if not isinstance(causes, list):
        raise TypeError(f"causes={causes!r}, expected a list")
    return {**arm, "causes": "; ".join(causes), "detail": "; ".join(str(f["detail"]) for f in said), "problem": ""}


def released_trainers(audits: pd.DataFrame) -> Section | None:
    """What was found in released trainers, one line per release and setting; None when nothing was audited."""
    if audits.empty:
        return None
    head = ("release", "setting", "N", "distance of the first gradient", "scale", "optimizer steps", "verdict")
    rows = []
    for (_, _), group in audits.groupby(["name", "function"], sort=False):
        first = group.iloc[0]
        rows.append(
            (
                f"{first.framework} {first.version}",
                str(first.setting),
                _listed(group.accumulation_steps, "{:.0f}"),
                ", ".join(number(float(value)) for value in group.distance),
                ", ".join(number(float(value)) for value in group["scale"]),
                _listed(group.steps, "{:.0f}") + _of(group),
                ", ".join(sorted({cause for causes in group.causes.dropna() for cause in causes.split("; ") if cause}))
                or str(first.verdict),
            )
        )
    releases = audits.groupby("name").version.first()
    different = audits[audits.verdict == "different"].groupby(["name", "function"]).ngroups
    text = f"{len(rows)} settings of {len(releases)} audited releases; {different} are another computation than the full batch."
    caption = (
        "Relative distance and scale of the gradient of the first optimizer step, compared with one full batch, per N. Optimizer "
        "steps: those of the accumulated run, and those of the full batch where they differ."
    )
    return Section("Released trainers", (Text(text), Table(head, tuple(rows), caption)))


def _listed(values: pd.Series, form: str) -> str:
    shown = [form.format(value) for value in values.dropna()]
    return ", ".join(shown if len(set(shown)) > 1 else shown[:1])


def _of(group: pd.DataFrame) -> str:
    return "" if (group.steps == group.reference_steps).all() else f" of {_listed(group.reference_steps, '{:.0f}')}"
