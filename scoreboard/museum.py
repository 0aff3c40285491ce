"""`make museum`: each fault of the advisories in a release that has it, and where it is mended, from scratch; then their page.

What an advisory calls `evidence` names two records of `records/` and a function of each. `make museum NAME=ID` makes these alone.
"""

from __future__ import annotations

import html
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from accumulation_harness.affected.__main__ import ADVISORIES, VISIBLE, Advisory, read, size

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])
from scoreboard import page, record

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/findings/museum.md"
STAIRCASE = HERE.parent / "docs/gallery/museum.svg"
ENDED, OPEN = "#0072b2", "#d55e00"  # faults that a release has mended, and the others
PRICES = HERE / "prices.json"
Records = dict[str, dict[str, Any]]
SIDES = ("broken", "fixed")


def held() -> Records:
    return {one["name"]: one for one in page.records(HERE / "records")}


def arms(records: Records, side: str) -> list[dict[str, Any]]:
    """Those of RECORD:FUNCTION."""
    name, _, function = side.partition(":")
    return [arm for arm in records.get(name, {"arms": []})["arms"] if arm["function"] == function]


def version(records: Records, side: str) -> str:
    one = records[side.partition(":")[0]]
    found: str = one["versions"][one["framework"]]
    return found.partition("+")[0]


def wrong(advisory: Advisory, records: Records) -> Iterator[str]:
    """What its records do not bear out."""
    evidence = advisory["evidence"]
    if missing := [evidence[side] for side in SIDES if not arms(records, evidence[side])]:
        yield f"no record of {', '.join(missing)}"
        return
    broken, fixed = (arms(records, evidence[side]) for side in SIDES)
    causes = sorted({cause for arm in broken for cause in arm["causes"]})
    if {arm["verdict"] for arm in broken} != {"different"} or causes != sorted(advisory["finding"]):
        yield f"{evidence['broken']}: found {', '.join(causes) or 'nothing'}, told {', '.join(advisory['finding'])}"
    if found := sorted({cause for arm in fixed for cause in arm["causes"]}):
        yield f"{evidence['fixed']}: found {', '.join(found)}"
    if advisory["error"] != error(broken):
        yield "the size of the error is not the record's"
    if advisory["affected"] is None:
        return
    framework = records[evidence["broken"].partition(":")[0]]["framework"]
    releases = [version(records, evidence[side]) for side in SIDES]
    affected = [release in SpecifierSet(advisory["affected"]) for release in releases]
    if canonicalize_name(framework) != canonicalize_name(advisory["package"]) or not affected[0]:
        yield f"{framework} {releases[0]} was run, and is not among the affected"
    if releases[0] != releases[1] and (affected[1] or releases[1] != advisory["fixed_in"]):
        yield f"{releases[1]} was run as the release that has it right, and {advisory['fixed_in']} is told"


def error(broken: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of the first optimizer step's gradient, by N."""
    digits = {str(arm["accumulation_steps"]): (arm["distance"], arm["scale"]) for arm in broken}
    return {n: {"distance": float(f"{d:.3g}"), "scale": float(f"{s:.3g}")} for n, (d, s) in digits.items()}


def picture(advisory: Advisory, records: Records) -> str:
    """How far each side is from one whole batch at the worst step, beside the gate, in SVG, on a scale of decades."""

    def place(value: float) -> float:
        return 90 + 46 * (min(max(math.log10(max(value, 1e-9)), -8), 2) + 8)

    rows = []
    for y, side, colour in ((6, "broken", "#c0392b"), (30, "fixed", "#2e7d32")):
        of = arms(records, advisory["evidence"][side])[0]
        value = of["largest_distance"] or 0.0
        number = f"{value:.2g}" if value > VISIBLE or side == "fixed" else "the gradients agree; the fault is elsewhere"
        told = f"{version(records, advisory['evidence'][side])}: {number}"
        rows.append(
            f'<text x="0" y="{y + 13}">{side}</text>'
            f'<rect x="90" y="{y}" width="{place(value) - 90:.0f}" height="16" fill="{colour}"/>'
            f'<text x="{place(value) + 5:.0f}" y="{y + 13}">{html.escape(told)}</text>'
        )
    gate = place(arms(records, advisory["evidence"]["broken"])[0]["gate"] or 1e-6)
    at = f'x1="{gate:.0f}" x2="{gate:.0f}" y1="0" y2="50"'
    rows.append(f'<line {at} stroke="currentColor" stroke-dasharray="3"/>')
    return (
        '<svg viewBox="0 0 700 52" width="700" font-size="12" fill="currentColor" role="img" '
        f'aria-label="{advisory["id"]}: distance from one whole batch">{"".join(rows)}</svg>'
    )


def published(gained: dict[str, float]) -> str:
    """Points that were gained by repairing, as a paper tells them, in SVG."""
    rows = []
    for k, (what, points) in enumerate(gained.items()):
        text, bar, wide = f'y="{20 * k + 14}"', f'y="{20 * k + 2}" height="15"', round(18 * points)
        rows.append(f'<text x="0" {text}>{html.escape(what)}</text><rect x="150" {bar} width="{wide}" fill="{ENDED}"/>')
        rows.append(f'<text x="{155 + wide}" {text}>{points:+g} points, as published</text>')
    return (
        f'<svg viewBox="0 0 700 {20 * len(gained)}" width="700" font-size="12" fill="currentColor" role="img" '
        f'aria-label="points gained by repairing, as published">{"".join(rows)}</svg>'
    )


def staircase(advisories: Sequence[Advisory]) -> str:
    """In SVG, from which release to which each fault of transformers lasts; the releases are those where one begins or ends."""
    every = [(SpecifierSet(one["affected"]), one) for one in advisories if one["package"] == "transformers"]
    ends = {(spec.operator, spec.version) for specifiers, _ in every for spec in specifiers}
    releases = sorted({release for _, release in ends}, key=Version)
    rows = []
    for specifiers, one in every:
        bounds = {spec.operator: releases.index(spec.version) for spec in specifiers}
        rows.append((bounds.get(">=", -1), bounds.get("<", len(releases)), one))
    width, parts = 640 / (len(releases) + 1), []
    for k, release in enumerate(releases):
        at = (k + 1) * width
        parts.append(f'<text x="{at:.0f}" y="14" text-anchor="middle">{release}</text>')
        parts.append(f'<line x1="{at:.0f}" x2="{at:.0f}" y1="20" y2="{26 + 38 * len(rows)}" stroke="#c9ced6"/>')
    for k, (begins, ended, one) in enumerate(sorted(rows, key=lambda row: row[:2])):
        x, y, far = (begins + 1) * width, 26 + 38 * k, (ended + 1) * width
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="{far - x:.0f}" height="14" fill="{OPEN if one["fixed_in"] is None else ENDED}"/>'
        )
        said = html.escape(one["title"].replace("`", ""))
        anchor, at = ("start", x) if x + 6 * len(said) < 640 else ("end", 640)
        parts.append(f'<text x="{at:.0f}" y="{y + 27}" text-anchor="{anchor}">{said}</text>')
    height = 32 + 38 * len(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 -4 648 {height + 8}" font-family="sans-serif" font-size="11" '
        f'fill="#22272e"><rect x="-4" y="-4" width="648" height="{height + 8}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


INTRODUCTION = """---
hide: [navigation, toc]
---

# The museum of real bugs

{faults} faults of released trainers that make N micro-batches a different computation from one large batch. Each was run on a CPU
twice: with the fault, where the audit had to say `different` and give the finding below, and without it, where it had to say
`equivalent`. {pairs} pairs are the last release that has the fault and the first that has not; {patterns} are patterns of scripts
that are in no package index; the others are one release, with and without the setting that avoids the fault.

The error is ‖a - g‖/‖g‖ of the first optimizer step's gradient: a is that of the micro-batches, g that of the large batch. What
was *run* was executed; what was *read* was only looked up in the source. A click on the head of a column sorts the table.

Are your releases among them? [`affected`](../affected.md) tells. `make museum NAME=ADVISORY` runs a pair again, in environments
of its own (ADVISORY: a name of the first column). To add a fault: [a template of thirty lines](../extend.md#an-advisory).
"""
HEAD = ("advisory", "package", "affected", "fixed in", "finding", "error of the first gradient, N = 4", "settings")
SORT = """<script>
document.querySelectorAll("th").forEach(head => head.onclick = () => {
  const body = head.closest("table").tBodies[0], key = row => row.cells[head.cellIndex].textContent;
  const sign = head.dataset.up = head.dataset.up === "1" ? -1 : 1;
  [...body.rows].sort((a, b) => sign * key(a).localeCompare(key(b), undefined, {numeric: true})).forEach(row => body.append(row));
});
</script>"""


def text(advisories: Sequence[Advisory], records: Records) -> str:
    """The page, in Markdown."""
    patterns = sum(a["affected"] is None for a in advisories)
    pairs = sum(len({version(records, side) for side in a["evidence"].values()}) > 1 for a in advisories)
    rows = [
        (
            f"[{a['id']}](#{a['id']})", a["package"], released(a), a["fixed_in"] or "",
            ", ".join(linked(a["finding"])), first(a), escaped(a["settings"]),
        )
        for a in advisories
    ]  # fmt: skip
    return "\n".join(
        [
            INTRODUCTION.format(faults=len(advisories), pairs=pairs, patterns=patterns),
            f"| {' | '.join(HEAD)} |",
            f"|{'---|' * len(HEAD)}",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            "![From which release to which each fault of transformers lasts](../gallery/museum.svg)",
            "",
            "The bars below show the largest error of any step's gradient for N = 4, on a logarithmic scale, with the fault and "
            "without it; the dashed line is what rounding explains.",
            "",
            *(line for advisory in advisories for line in part(advisory, records)),
            *prices(),
            SORT,
            "",
        ]
    )


def released(advisory: Advisory) -> str:
    return "a pattern" if advisory["affected"] is None else f"`{advisory['affected']}`"


def first(advisory: Advisory) -> str:
    distance = advisory["error"]["4"]["distance"]
    return f"{distance:.3g}" if distance > VISIBLE else "0: it shows later"


def linked(causes: Sequence[str]) -> list[str]:
    return [f"[`{cause}`](../remedies.md#{cause})" for cause in causes]


def escaped(line: str) -> str:
    return line.replace("*", "\\*").replace("_", "\\_").replace("|", "\\|")


def part(advisory: Advisory, records: Records) -> Iterator[str]:
    """One fault: what is wrong, how it shows, what to do, a figure."""
    links = [f"[{link.removeprefix('https://').removeprefix('github.com/')}]({link})" for link in advisory["threads"]]
    fixed = advisory["fixed_in"]
    yield from (f"## {advisory['id']}", "")
    told = {key: escaped(advisory[key]) for key in ("title", "settings", "bounds", "shows", "remedy")}
    lines = {
        "Happens with": told["settings"],
        "How it shows": told["shows"].removesuffix("."),
        "What to do": told["remedy"],
        "What the audit finds": f"{', '.join(linked(advisory['finding']))}; {size(advisory)}",
        "Evidence": told["bounds"] + (f" Last run: {', '.join(runs)}." if (runs := last(advisory, records)) else ""),
        "Published": advisory.get("published", ""),
        "See": ", ".join(links),
    }
    yield f"{told['title']}: {advisory['package']}, {released(advisory)}{f', right since {fixed}' if fixed else ''}."
    yield from ("", *(f"- *{name}*: {line}{'' if line.endswith('.') else '.'}" for name, line in lines.items() if line))
    yield from ("", picture(advisory, records), "")
    if "gained" in advisory:
        yield from (published(advisory["gained"]), "")


def last(advisory: Advisory, records: Records) -> list[str]:
    """When its records were made, and at which commit, where they say so."""
    told = [advisory["evidence"][side] for side in SIDES]
    runs = [arms(records, side)[0].get("run", records[side.partition(":")[0]].get("run")) for side in told]
    return list(dict.fromkeys(f"{run['date']} at {run['commit']}" for run in runs if run))


def prices() -> Iterator[str]:
    """What four of the faults cost a small training, from `prices.json`."""
    if not PRICES.exists():
        return
    made = json.loads(PRICES.read_text())
    yield from (
        "## What a bug costs",
        "",
        made["what"],
        "",
        "| fault | held-out loss, right | broken | price (95 % interval) | seeds worse |",
    )
    yield "|---|---|---|---|---|"
    for row in made["rows"]:
        low, high = row["interval"]
        yield (
            f"| {row['fault']} | {row['right']:.4f} | {row['broken']:.4f} | {row['price']:+.4f} ({low:+.4f} to {high:+.4f}) "
            f"| {row['worse']} of {row['seeds']} |"
        )
    yield ""


def ran(name: str, functions: Iterable[str]) -> bool:
    """Make a record of these; one environment that cannot be installed does not end the others."""
    try:
        return record.main(name, *functions) == 0
    except subprocess.CalledProcessError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return False


def main(asked: str) -> int:
    """Make the records that are asked for, then say whether every one bears its advisory out."""
    advisories = read(ADVISORIES)
    chosen = [advisory for advisory in advisories if asked in ("", "all", advisory["id"])]
    if not chosen:
        print(f"NAME={asked}: expected one of {', '.join(advisory['id'] for advisory in advisories)}", file=sys.stderr)
        return 2
    needed: dict[str, dict[str, None]] = {}
    for name, _, function in (advisory["evidence"][side].partition(":") for advisory in chosen for side in SIDES):
        needed.setdefault(name, {})[function] = None
    failed = [name for name, functions in needed.items() if asked and not ran(name, functions)]
    records = held()
    for advisory in chosen:
        advisory["error"] = error(arms(records, advisory["evidence"]["broken"]))
    whole = json.loads(ADVISORIES.read_text()) | {"advisories": advisories}
    ADVISORIES.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    problems = {advisory["id"]: list(wrong(advisory, records)) for advisory in advisories}
    for advisory in chosen:
        problems[advisory["id"]] += [
            f"{name} was not run" for name in failed if name in {told.partition(":")[0] for told in advisory["evidence"].values()}
        ]
    for advisory in chosen:
        print(f"{advisory['id']}: {'; '.join(problems[advisory['id']]) or 'as told'}")
    if not any(problems.values()):
        PAGE.write_text(text(advisories, records))
        STAIRCASE.write_text(staircase(advisories))
        print(PAGE)
    return int(any(problems[advisory["id"]] for advisory in chosen))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [""]))
