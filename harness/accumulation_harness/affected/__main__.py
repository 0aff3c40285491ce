"""`accumulation-harness affected`: which pinned releases compute something else with gradient accumulation."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

from accumulation_harness.affected import pins
from accumulation_harness.affected.pins import Pin
from accumulation_harness.system import terminal

ADVISORIES = Path(__file__).with_name("advisories.json")
VISIBLE = 1e-4  # a distance that rounding does not explain, in any audit
Advisory = dict[str, Any]  # the fields: docs/affected.md


class Match(NamedTuple):
    """An advisory that concerns a package of the project."""

    advisory: Advisory
    pin: Pin

    @property
    def is_certain(self) -> bool:
        """Whether the release is pinned; else the range admits affected ones."""
        return self.pin.version is not None


def read(path: Path) -> list[Advisory]:
    """Return the advisories of a file.

    Args:
        path: A JSON file.

    Returns:
        The advisories.

    Raises:
        ValueError: It is no file of advisories.
    """
    try:
        held: list[Advisory] = json.loads(path.read_text())["advisories"]
        for advisory in held:
            SpecifierSet(advisory["affected"] or "")
            {key: advisory[key] for key in ("id", "package", "title", "settings", "finding", "error", "remedy")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: expected a file of advisories, got {type(error).__name__}: {error}") from error
    return held


def _matches(found: Iterable[Pin], advisories: Iterable[Advisory]) -> Iterator[Match]:
    """Yield what concerns the packages, in their order."""
    held = list(advisories)
    for pin in found:
        for advisory in held:
            if advisory["affected"] is not None and pin.package in _names(advisory) and _concerns(advisory, pin):
                yield Match(advisory, pin)


def _concerns(advisory: Advisory, pin: Pin) -> bool:
    """Whether the release is affected, or one that the range admits."""
    affected = SpecifierSet(advisory["affected"], prereleases=True)
    if pin.version is not None:
        return pin.version in affected
    bounds = [Version(one.version.removesuffix(".*")) for one in (*affected, *pin.admitted)]
    # Two ranges meet at a bound of theirs, just above one, or at the very beginning.
    tried = {Version("0"), *bounds, *(Version(f"{bound.base_version}.0.1") for bound in bounds)}
    return any(one in affected and pin.admitted.contains(one, prereleases=True) for one in tried)


def _names(advisory: Advisory) -> set[NormalizedName]:
    """What the package of an advisory is called where it is installed."""
    return {canonicalize_name(name) for name in (advisory["package"], *advisory.get("also", ()))}


def advisory_lines(match: Match) -> Iterator[str]:
    """Describe an advisory for people.

    Args:
        match: An advisory and the pin that it concerns.

    Yields:
        Lines.
    """
    advisory, fixed = match.advisory, match.advisory.get("fixed_in")
    yield f"  {advisory['id']}: {advisory['title']}"
    lines = {
        "if": advisory["settings"],
        "error": f"{', '.join(advisory['finding'])}; {size(advisory)}",
        "shows": advisory.get("shows", ""),
        "do": f"{fixed} has it right; {advisory['remedy']}" if fixed else advisory["remedy"],
        "see": " ".join(advisory.get("threads", ())),
    }
    for name, line in lines.items():
        yield from textwrap.wrap(
            line, 116, initial_indent=f"    {name + ':':7}", subsequent_indent=" " * 11, break_on_hyphens=False
        )


def size(advisory: Advisory) -> str:
    """Say how far the gradient of the first optimizer step was from that of the whole batch, as measured.

    >>> size({"error": {"4": {"distance": 0.1733, "scale": 1.03}}})
    'first gradient off by 0.173 times the right one at N=4'

    Args:
        advisory: A row of the scoreboard: the error at each N.

    Returns:
        ||a - g|| / ||g|| at each N.
    """
    off = {steps: row["distance"] for steps, row in advisory["error"].items() if row["distance"] > VISIBLE}
    told = ", ".join(f"{distance:.3g} times the right one at N={steps}" for steps, distance in off.items())
    return f"first gradient off by {told}" if off else "first gradient right: it shows in later steps, or not in gradients"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the advisories of the pinned releases.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        0 where no pinned release is affected, 1 where one is, 2 where nothing could be read.
    """  # noqa: DOC501 (it is caught)
    parser = terminal.parser("affected", __doc__)
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", type=Path,
        help="requirements, a lock file, an environment of conda, or a folder of them; without: what is installed here",
    )  # fmt: skip
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--ignore", action="append", default=[], metavar="ID", help="an advisory whose settings you do not use")
    parser.add_argument("--advisories", action="append", default=[], metavar="FILE", type=Path, help="your own, beside ours")
    given = parser.parse_args(arguments)
    try:
        held = [advisory for path in (ADVISORIES, *given.advisories) for advisory in read(path)]
        if unknown := sorted({*given.ignore} - {advisory["id"] for advisory in held}):
            raise ValueError(terminal.suggesting(f"--ignore {unknown[0]}: expected one of {', '.join(a['id'] for a in held)}"))
        found = list(dict.fromkeys(pin for path in given.paths for pin in pins.of(path)) if given.paths else pins.installed())
    except ValueError as error:
        print(terminal.one_line(error), file=sys.stderr)
        return terminal.BAD_INPUT
    known = {name for advisory in held for name in _names(advisory)}
    looked_at = [pin for pin in found if pin.package in known]
    concerned = list(_matches(looked_at, [advisory for advisory in held if advisory["id"] not in given.ignore]))
    certain = [match for match in concerned if match.is_certain]
    if given.format == "json":
        rows = [
            {
                **match.advisory,
                "package": match.pin.package,
                "version": str(match.pin.version or match.pin.admitted),
                "where": match.pin.where,
                "pinned": match.is_certain,
            }
            for match in concerned
        ]
        print(json.dumps({"looked_at": [str(pin) for pin in looked_at], "affected": rows}, indent=1))
        return int(bool(certain))
    for pin in dict.fromkeys(match.pin for match in concerned):
        print(f"{pin}: " + ("affected" if pin.version else "not pinned, and admits affected releases"))
        print(*(line for match in concerned if match.pin == pin for line in advisory_lines(match)), "", sep="\n")
    print(
        f"{len({match.pin for match in certain})} affected of {len(looked_at)} known packages ({len(found)} read, "
        f"{len(held)} advisories on {len(known)} packages). No list knows your own loop: accumulation-harness audit does."
    )
    return int(bool(certain))


if __name__ == "__main__":
    sys.exit(main())
