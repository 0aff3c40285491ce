"""`python -m tests.chaos [--minutes 15] [--seed 0] [--only NAME] [--case K]`: every campaign in turn; a table at the end.

A case is drawn from the seed, the campaign and its number alone, so what the table calls broken can be tried again.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.chaos import campaigns
from tests.chaos.campaign import Attack, Broken, CannotStart


@dataclass
class Tally:
    """What came of one campaign so far."""

    attack: Attack
    seconds: float = 0.0
    tried: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)  # by the number of the case
    lacks: str = ""  # what could not be made before its first attack: it is not tried again


def found() -> dict[str, Tally]:
    """Every module of `campaigns` has one `attack`."""
    names = sorted(module.name for module in pkgutil.iter_modules(campaigns.__path__))
    return {name: Tally(importlib.import_module(f"{campaigns.__name__}.{name}").attack) for name in names}


def try_case(name: str, tally: Tally, number: int, seed: int) -> None:
    """One case; any exception out of an attack is a break, since a campaign has to expect what it provokes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            tally.answers[tally.attack(Random(f"{seed}/{name}/{number}"), Path(folder))] += 1
        except CannotStart as lacks:
            tally.lacks = str(lacks)
            return
        except Broken as broken:
            tally.broken[number] = str(broken)
        except Exception:
            tally.broken[number] = traceback.format_exc()
    tally.tried += 1
    tally.seconds += time.monotonic() - began


def table(tallies: dict[str, Tally]) -> str:
    """Tried, clear, broken by campaign; then what came of the clear ones, and each break with its number."""
    lines = [f"{'campaign':<20}{'tried':>8}{'clear':>8}{'broken':>8}{'seconds':>9}"]
    for name, tally in tallies.items():
        clear = sum(tally.answers.values())
        lines.append(f"{name:<20}{tally.tried:>8}{clear:>8}{len(tally.broken):>8}{tally.seconds:>9.0f}")
    for name, tally in tallies.items():
        lines += [f"  {name}: {count} x {answer}" for answer, count in tally.answers.most_common()]
    lines += [
        f"COULD NOT START {name}, which has attacked nothing: {tally.lacks}" for name, tally in tallies.items() if tally.lacks
    ]
    for name, tally in tallies.items():
        lines += [f"BROKEN {name} --case {number}: {what}" for number, what in tally.broken.items()]
    return "\n".join(lines)


def exit_code(tallies: dict[str, Tally]) -> int:
    """1 where anything broke; else 2 where a campaign could not start."""
    if any(tally.broken for tally in tallies.values()):
        return 1
    return 2 if any(tally.lacks for tally in tallies.values()) else 0


def main() -> int:
    """Exit code 1 where anything broke, else 2 where a campaign could not start."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="attacks on the program, drawn from a seed")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="a campaign; may be given several times")
    parser.add_argument("--case", type=int, help="this case alone, with --only")
    options = parser.parse_args()
    tallies = {name: tally for name, tally in found().items() if options.only is None or name in options.only}
    if not tallies:
        parser.error(f"--only={options.only}: expected one of {', '.join(found())}")
    if options.case is not None:
        for name, tally in tallies.items():
            try_case(name, tally, options.case, options.seed)
    end = time.monotonic() + 60 * options.minutes
    while options.case is None and time.monotonic() < end and not all(tally.lacks for tally in tallies.values()):
        name, tally = min(((n, t) for n, t in tallies.items() if not t.lacks), key=lambda item: item[1].seconds)
        try_case(name, tally, tally.tried, options.seed)
        print(f"\r{sum(t.tried for t in tallies.values())} cases, {sum(len(t.broken) for t in tallies.values())} broken",
              end="", file=sys.stderr, flush=True)  # fmt: skip
    print(file=sys.stderr)
    print(table(tallies))
    return exit_code(tallies)


if __name__ == "__main__":
    sys.exit(main())
