"""`make scoreboard`: the page of audited releases from `records/*.json`, and the rows on which claims of the ledger rest.

The same settings of other releases of a framework say since which audited release a result holds, and in which it was gone.
"""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomllib
from packaging.version import Version

from accumulation_harness.analysis.content import number

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/findings/scoreboard.md"
ROWS = HERE.parent / "experiments/recorded/released_trainers.csv"
CLAIMED = ("accelerate", "keras-by-hand", "lightning")  # the records on which G1 to G3 rest
COLUMNS = ("name", "framework", "version", "function", "accumulation_steps", "verdict", "causes", "distance", "largest_distance")
RAISED = "raised an error"
INTRODUCTION = """---
hide: [navigation, toc]
---

# Scoreboard of audited releases

{settings} settings of {releases} releases: {different} are a different computation from one large batch, {equivalent} are
equivalent, {raised} raised an error. Each was trained on a CPU, mostly in batches of 16 that were cut into N micro-batches, with
the versions in its record (`scoreboard/records`). *Hand-written* loops are ours and follow a paper; all other code was run as
released.

- *a remainder*: the batch does not divide the rows (mostly 40), so that each epoch ends with a short window; *divisible*: it
  divides them (mostly 32).
- *distance* is ‖a - g‖/‖g‖ and *scale* ‖a‖/‖g‖: a is the first gradient of the micro-batches, g that of the large batch.
- *since*: the first audited release of the framework with this line's finding; *fixed in*: the first later one that is
  equivalent. What lies between two audited releases was not run.

[How a verdict comes about](../audit.md) · [what to do about a cause](../remedies.md) · `make scoreboard` makes this page from the
records.
"""
HEAD = ("release", "setting", "finding", "distance (N)", "scale (N)", "since", "fixed in", "reproduce")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One setting of one audited release."""

    name: str  # of the record
    framework: str
    version: str
    function: str
    finding: str  # its causes, `equivalent`, or `raised an error`
    distances: str  # by N
    scales: str  # by N
    since: str = ""  # first audited release from which on the finding is this one
    fixed_in: str = ""  # first later one that is equivalent

    def is_of(self, other: Line) -> bool:
        """Whether the other is this line, or the same setting in another release."""
        same = (self.framework, self.function) == (other.framework, other.function)
        return same and (self.name == other.name or self.version != other.version)


def records(folder: Path) -> list[dict[str, Any]]:
    """Every record, by its name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def lines(held: Sequence[dict[str, Any]]) -> list[Line]:
    """One per release and setting, by framework, setting and release."""
    found = [line for record in held for line in _lines(record)]
    found.sort(key=lambda line: (line.framework, line.function, Version(line.version)))
    return [_dated(line, [other for other in found if line.is_of(other)]) for line in found]


def _lines(record: dict[str, Any]) -> Iterator[Line]:
    of = {"name": record["name"], "framework": record["framework"], "version": record["versions"][record["framework"]]}
    for function in dict.fromkeys(row["function"] for row in (*record["arms"], *record["problems"])):
        arms = [arm for arm in record["arms"] if arm["function"] == function]
        causes = dict.fromkeys(cause for arm in arms for cause in arm["causes"])
        yield Line(
            **of,
            function=function,
            finding=", ".join(causes) or (arms[0]["verdict"] if arms else RAISED),
            distances=_by_steps(arms, "distance"),
            scales=_by_steps(arms, "scale"),
        )


def _by_steps(arms: Sequence[dict[str, Any]], key: str) -> str:
    return ", ".join(f"{number(arm[key])} ({arm['accumulation_steps']})" for arm in arms if arm[key] is not None)


def _dated(line: Line, releases: Sequence[Line]) -> Line:
    """`releases`: the same setting in every audited release, in order."""
    place = before = releases.index(line)
    while before and releases[before - 1].finding == line.finding:
        before -= 1
    fixed = next((later.version for later in releases[place + 1 :] if later.finding == "equivalent"), "")
    since = releases[before].version if len(releases) > 1 else ""
    return replace(line, since=since, fixed_in=fixed if line.finding != "equivalent" else "")


def settings() -> dict[tuple[str, str], str]:
    """(Name of a record, function) -> what the function says it sets."""
    known = tomllib.loads((HERE / "trainers.toml").read_text())
    trees = {one["file"]: ast.parse((HERE / f"{one['file']}.py").read_text()) for one in known.values()}
    said = {
        (file, node.name): (ast.get_docstring(node) or "").partition("\n")[0].rstrip(".")
        for file, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    return {(name, function): said[one["file"], function] for name, one in known.items() for function in one["functions"]}


def page(found: Sequence[Line], said: Mapping[tuple[str, str], str]) -> str:
    """In Markdown; `said`: the `settings()`."""
    different = [line for line in found if line.finding not in ("equivalent", RAISED)]
    raised = [line for line in found if line.finding == RAISED]
    releases = {(line.framework, line.version) for line in found}
    rows = [
        (
            f"{line.framework} {line.version}",
            f"{said[line.name, line.function].replace('|', chr(92) + '|')} (`{line.function}`)",
            ", ".join(f"`{cause}`" if line in different else cause for cause in line.finding.split(", ")),
            *(line.distances, line.scales, line.since, line.fixed_in, f"`make trainer NAME={line.name}`"),
        )
        for line in found
    ]
    return "\n".join(
        [
            INTRODUCTION.format(
                settings=len(found),
                releases=len(releases),
                different=len(different),
                raised=len(raised),
                equivalent=len(found) - len(different) - len(raised),
            ),
            f"| {' | '.join(HEAD)} |",
            f"|{'---|' * len(HEAD)}",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
        ]
    )


def rows(held: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of the records on which claims rest, an arm each."""
    for record in held:
        of = {"name": record["name"], "framework": record["framework"], "version": record["versions"][record["framework"]]}
        for arm in record["arms"] if record["name"] in CLAIMED else ():
            yield {name: value for name, value in (arm | of).items() if name in COLUMNS} | {"causes": "; ".join(arm["causes"])}


if __name__ == "__main__":
    held = records(HERE / "records")
    PAGE.write_text(page(lines(held), settings()))
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(held))
    print(PAGE, ROWS, sep="\n")
