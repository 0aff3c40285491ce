"""What an audit concluded: as a value, a table in the terminal, a frame, JSON and one self-contained page."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import pandas as pd
from rich.console import Console
from rich.table import Table

from harness.audit.compare.facts import Facts
from harness.audit.evidence import Finding
from harness.judge.cause import Cause
from harness.results.record import write_atomically

WIDTH = 130
REMEDIES = "docs/remedies.md"
Status = Literal["equivalent", "different", "inconclusive"]
COLUMNS = (
    *("accumulation_steps", "arithmetic", "optimizer", "optimizer_step", "tensor", "distance", "scale", "cosine", "gate"),
    *("update_distance", "learning_rate", "reference_learning_rate", "micro_batches", "equivalent"),
)


@dataclass(frozen=True)
class ArmResult:
    """One number of accumulation steps, in one arithmetic."""

    accumulation_steps: int
    arithmetic: str  # `as trained`, or the dtype the function was given
    facts: tuple[Facts, ...]  # per optimizer
    findings: tuple[Finding, ...]
    evidence: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The answer: `equivalent` only when every arm ran, was judged, and no finding was made."""

    batch_size: int
    results: tuple[ArmResult, ...]
    problems: tuple[str, ...]  # why something could not be judged; partial evidence is in `results`
    hidden: tuple[str, ...]  # what this run could not have shown, and what to change

    @property
    def findings(self) -> tuple[Finding, ...]:
        """One per arm and cause, in whichever arithmetic it was seen first."""
        kept: dict[tuple[int, Cause], Finding] = {}
        for result in self.results:
            for finding in result.findings:
                kept.setdefault((finding.accumulation_steps, finding.cause), finding)
        return tuple(kept[key] for key in sorted(kept, key=lambda key: key[0]))

    @property
    def equivalent(self) -> bool:
        """Whether every arm ran and was judged, and nothing was found."""
        return bool(self.results) and not self.findings and not self.problems

    @property
    def status(self) -> Status:
        """`inconclusive` when nothing was found, and not everything could be judged."""
        if self.findings:
            return "different"
        return "equivalent" if self.equivalent else "inconclusive"

    @property
    def exit_code(self) -> int:
        """Of the command: 0 equivalent, 1 different, 2 could not be judged."""
        return {"equivalent": 0, "different": 1, "inconclusive": 2}[self.status]

    @property
    def frame(self) -> pd.DataFrame:
        """One row per arm, arithmetic, optimizer, optimizer step and tensor; the tensor `all` is the whole gradient."""
        return pd.DataFrame(list(self._rows()), columns=COLUMNS)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for result in self.results:
            for item in result.facts:
                for step in item.steps:
                    lrs, wanted = item.run.mine.lrs[step.step], item.run.reference.lrs[step.step]
                    shared = {
                        "accumulation_steps": result.accumulation_steps,
                        "arithmetic": result.arithmetic,
                        "optimizer": step.track,
                        "optimizer_step": step.step,
                        "gate": step.gate,
                        "learning_rate": lrs[0] if lrs else math.nan,
                        "reference_learning_rate": wanted[0] if wanted else math.nan,
                        "micro_batches": step.window.backwards,
                        "equivalent": step.agrees,
                    }
                    yield {**shared, "tensor": "all", **vars(step.raw), "update_distance": step.update.distance}
                    for name, seen in step.tensors.items():
                        yield {**shared, "tensor": name, **vars(seen), "update_distance": math.nan}

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON types; numbers that are not finite are None."""
        return {
            "status": self.status,
            "equivalent": self.equivalent,
            "batch_size": self.batch_size,
            "findings": [
                {
                    "accumulation_steps": f.accumulation_steps,
                    "optimizer_step": f.optimizer_step,
                    "cause": f.cause,
                    "message": f.message,
                    "evidence": _plain(f.evidence),
                    "remedy": remedy(f.cause),
                }
                for f in self.findings
            ],
            "problems": list(self.problems),
            "hidden": list(self.hidden),
            "arms": [
                {
                    "accumulation_steps": r.accumulation_steps,
                    "arithmetic": r.arithmetic,
                    "evidence": _plain(r.evidence),
                    "causes": sorted({f.cause for f in r.findings}),
                }
                for r in self.results
            ],
            "steps": _plain(self.frame[self.frame.tensor == "all"].to_dict("records")),
        }

    def to_json(self) -> str:
        """Strict JSON: a non-finite number is written as null."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page (`.html`) or the JSON (`.json`), whole or not at all. Raises ValueError for another ending."""
        target = Path(path)
        if target.suffix not in (".html", ".json"):
            raise ValueError(f"expected a path ending in .html or .json, got {target}")
        text = self.to_json() if target.suffix == ".json" else self.to_html()
        write_atomically(target, text.encode())
        return target

    def to_html(self) -> str:
        """One self-contained page."""
        environment = jinja2.Environment(loader=jinja2.PackageLoader("harness.audit", "templates"), autoescape=True)
        environment.filters["short"] = _short
        steps = self.frame[self.frame.tensor == "all"].to_dict("records")
        return environment.get_template("audit.html").render(report=self, steps=steps, remedy=remedy)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, force_terminal=False, color_system=None)
        console.print(f"audit of batches of {self.batch_size}: {self.status}", highlight=False)
        if self.results:
            console.print(self._table())
        for finding in self.findings:
            where = "" if finding.optimizer_step is None else f", from optimizer step {finding.optimizer_step}"
            console.print(f"N={finding.accumulation_steps}{where}: {finding.cause}", highlight=False, markup=False)
            console.print(f"    {finding.message}", highlight=False, markup=False)
            console.print(f"    remedy: {remedy(finding.cause)}", highlight=False, markup=False)
        for title, lines in (("could not be judged", self.problems), ("could not be seen", self.hidden)):
            for line in lines:
                console.print(f"{title}: {line}", highlight=False, markup=False)
        output = console.file
        assert isinstance(output, io.StringIO)
        return output.getvalue()

    def _table(self) -> Table:
        table = Table(show_edge=False, pad_edge=False)
        for name in ("N", "arithmetic", "optimizer", "steps", "largest distance", "gate there", "scale", "cosine", "causes"):
            table.add_column(name, justify="left" if name in ("arithmetic", "optimizer", "causes") else "right")
        for result in self.results:
            for item in result.facts:
                worst = max(item.steps, key=lambda s: s.raw.distance / s.gate if s.gate else s.raw.distance, default=None)
                numbers = ("",) * 4 if worst is None else (worst.raw.distance, worst.gate, worst.raw.scale, worst.raw.cosine)
                causes = sorted({f.cause for f in result.findings if f.track in (None, item.run.track)})
                steps = f"{item.run.mine.steps} of {item.run.reference.steps}"
                cells = [str(result.accumulation_steps), result.arithmetic, item.run.track, steps]
                table.add_row(*cells, *(_short(number) for number in numbers), ", ".join(causes) or "equivalent")
        return table


def remedy(cause: Cause) -> str:
    """Where the documentation says what to change: `docs/remedies.md#CAUSE`."""
    return f"{REMEDIES}#{cause}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """JSON types; non-finite numbers become None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (bool, int, str)) or value is None else str(value)
