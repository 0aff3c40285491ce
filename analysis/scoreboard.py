"""`python -m accumulation_harness.analysis.scoreboard`: the page of audited releases from their records, and what has changed.

A record (`audit/released.py`) is one release; the same settings of other releases of that framework say since which
audited release a result holds, and in which it was gone. Exit code 0: nothing differs from the stored records, 1: something does.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from packaging.version import Version

from accumulation_harness.analysis.audits import read_audits
from accumulation_harness.analysis.content import number
from accumulation_harness.results.record import write_atomically

STORED, NEW, PAGE = Path("docs/findings"), Path("results"), Path("docs/findings/scoreboard.md")
TARGETS = Path("scoreboard/trainers.mk")
HEAD = ("release", "setting", "finding", "distance of the first gradient, N", "since", "fixed in", "reproduce")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One setting of one audited release."""

    name: str  # of the record
    framework: str
    version: str
    function: str
    setting: str
    finding: str  # its causes, `equivalent`, or `not run`
    distances: str  # by N
    since: str = ""  # first audited release from which on the finding is this one
    fixed_in: str = ""  # first later one that is equivalent

    def is_of(self, other: Line) -> bool:
        """Whether the other is this line, or the same setting in another release."""
        same = (self.framework, self.function) == (other.framework, other.function)
        return same and (self.name == other.name or self.version != other.version)


def lines(audits: pd.DataFrame) -> list[Line]:
    """One per release and setting, by framework, setting and release."""
    found = [_line(group) for _, group in audits.groupby(["name", "function"], sort=False)]
    found.sort(key=lambda line: (line.framework, line.function, Version(line.version)))
    return [_dated(line, [other for other in found if line.is_of(other)]) for line in found]


def _line(group: pd.DataFrame) -> Line:
    first = group.iloc[0]
    causes = dict.fromkeys(cause for joined in group.causes.dropna() for cause in str(joined).split("; ") if cause)
    known = group[group.distance.notna() & group.accumulation_steps.notna()]
    pairs = zip(known.distance.astype(float), known.accumulation_steps.astype(float), strict=True)
    shown = [f"{number(distance)} ({n:.0f})" for distance, n in pairs]
    return Line(
        name=str(first["name"]),
        framework=str(first.framework),
        version=str(first.version),
        function=str(first.function),
        setting=str(first.setting) if isinstance(first.setting, str) else "",
        finding=", ".join(causes) or str(first.verdict),
        distances=", ".join(shown),
    )


def _dated(line: Line, releases: Sequence[Line]) -> Line:
    """`releases`: the same setting in every audited release, in order."""
    place = releases.index(line)
    before = place
    while before and releases[before - 1].finding == line.finding:
        before -= 1
    fixed = next((later.version for later in releases[place + 1 :] if later.finding == "equivalent"), "")
    since = releases[before].version if before or len(releases) > 1 else ""
    return Line(**{**vars(line), "since": since, "fixed_in": fixed if line.finding != "equivalent" else ""})


def commands(makefile: str) -> dict[str, str]:
    """Record -> the command that makes it, as the targets of `scoreboard/trainers.mk` say."""
    found, target = {}, ""
    for row in makefile.splitlines():
        if match := re.match(r"(audit-[\w-]+):.*##", row):
            target = match[1]
        elif match := re.search(r"\$\(call audit,(.*)\)$", row):
            found[match[1].split(",")[3]] = f"make {target}"
    return found


def page(found: Sequence[Line], how: Mapping[str, str]) -> str:
    """The page in Markdown."""
    different = [line for line in found if line.finding not in ("equivalent", "not run")]
    releases = {(line.framework, line.version) for line in found}
    rows = [
        (
            f"{line.framework} {line.version}",
            f"{_cell(line.setting)} (`{line.function}`)",
            ", ".join(f"`{cause}`" if line in different else cause for cause in line.finding.split(", ")),
            line.distances,
            line.since,
            line.fixed_in,
            f"`{how[line.name]}`" if line.name in how else "",
        )
        for line in found
    ]
    return "\n".join(
        [
            "# Scoreboard of audited releases",
            "",
            f"{len(found)} settings of {len(releases)} releases; {len(different)} are another computation than one full batch. "
            "Every line was run as released, with the versions in its record (`docs/findings/audits`); `make scoreboard` makes "
            "this page from these records. *Since* and *fixed in* name audited releases of the same framework: what lies between "
            "two of them was not run. How the verdicts come about: [audit.md](../audit.md); what to do about a cause: "
            "[remedies.md](../remedies.md).",
            "",
            f"| {' | '.join(HEAD)} |",
            f"|{'---|' * len(HEAD)}",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
        ]
    )


def _cell(text: str) -> str:
    return " ".join(text.rstrip(".").replace("|", "\\|").split())


def changes(stored: pd.DataFrame, new: pd.DataFrame) -> Iterator[str]:
    """What a new record says otherwise than the stored one of the same name, a line per setting."""
    held = {(line.name, line.function): line for line in lines(stored)}
    for line in lines(new):
        old, which = held.get((line.name, line.function)), f"{line.framework} {line.version}, {line.function}"
        if old is None:
            yield f"{which}: {line.finding} (no stored record)"
        elif old.finding != line.finding:
            yield f"{which}: {old.finding} in {old.version} -> {line.finding}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, print what has changed; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m accumulation_harness.analysis.scoreboard", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--stored", type=Path, default=STORED, help=f"folder that holds audits/*.json (default {STORED})")
    parser.add_argument("--new", type=Path, default=NEW, help=f"folder with audits made since (default {NEW})")
    parser.add_argument("--out", type=Path, default=PAGE, help=f"page to write (default {PAGE})")
    given = parser.parse_args(arguments)
    try:
        stored, new = read_audits(given.stored), read_audits(given.new)
        how = commands(TARGETS.read_text()) if TARGETS.is_file() else {}
        found = lines(stored)
        write_atomically(given.out, page(found, how).encode())
    except (OSError, ValueError) as error:
        print(f"scoreboard: {error}", file=sys.stderr)
        return 2
    changed = list(changes(stored, new))
    print("\n".join([f"{given.out}: {len(found)} settings", *changed]))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
