"""`accumulation-harness status [--results DIR]`: where the sweeps of a store stand, also while other processes write to it."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accumulation_harness.results import sweeps
from accumulation_harness.results.record import in_one_line
from accumulation_harness.results.store import State, Status, Store, StoreWarning
from accumulation_harness.sweep.progress import clock
from accumulation_harness.system import terminal
from accumulation_harness.system.processes import run_command

MOST_FAILURES = 10  # that are listed
WAITING = "waiting"  # asked for, and not begun


@dataclass(frozen=True)
class Standing:
    """One experiment: how many trials are in each state, and what is left of the sweeps that were asked for."""

    experiment: str
    counts: Counter[str]
    left: float | None  # seconds, where some trial has finished since its sweep began


def main(arguments: Sequence[str] | None = None) -> int:
    """Print where the trials of a store stand; the exit code is 1 where there are none.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        0, or 1 without a trial.
    """
    parser = terminal.parser("status", __doc__)
    parser.add_argument("--results", type=Path, default="results", metavar="DIR", help="folder of the store (default: results)")
    options = parser.parse_args(arguments)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", StoreWarning)
        found = {f"{one.experiment}/{one.trial}": one for one in Store(options.results).status()}
    asked, unread = sweeps.announced(options.results)
    unread += [str(one.message) for one in seen]
    for line in (*(lines(found, asked, time.time()) if found or asked else ()), *unread):
        print(in_one_line(line))
    if not found and not asked and not unread:
        print(f"{options.results}: no trials", file=sys.stderr)
    return 0 if found or asked else 1


def standings(found: dict[str, Status], asked: Sequence[sweeps.Sweep], now: float) -> list[Standing]:
    """Count trials by state. A trial that several sweeps asked for counts once, with the latest.

    Args:
        found: Name -> status of each trial in the store.
        asked: The sweeps that were started.
        now: Seconds since the epoch.

    Returns:
        One for each experiment, in the order of their names.
    """
    started = {trial: sweep.started for sweep in asked for trial in sweep.trials}
    states = {name: str(one.state) for name, one in found.items()}
    states |= {trial: WAITING for trial in started if trial not in states}
    by_experiment: dict[str, list[str]] = {}
    for name in states:
        by_experiment.setdefault(name.partition("/")[0], []).append(name)
    standing = []
    for experiment, names in sorted(by_experiment.items()):
        open_trials = [name for name in names if name in started and states[name] not in (State.finished, State.failed)]
        begun = min((started[name] for name in open_trials), default=now)
        ended = sum(
            states[name] == State.finished and _modified(found[name].folder / "trial.json", 0.0) >= begun for name in names
        )
        is_known = ended and now > begun  # else a clock was set back meanwhile
        left = len(open_trials) * (now - begun) / ended if is_known else (None if open_trials else 0.0)
        standing.append(Standing(experiment, Counter(states[name] for name in names), left))
    return standing


def lines(found: dict[str, Status], asked: Sequence[sweeps.Sweep], now: float) -> Iterator[str]:
    """Lay out where trials stand.

    Args:
        found: Name -> status of each trial in the store.
        asked: The sweeps that were started.
        now: Seconds since the epoch.

    Yields:
        One line per experiment, the running trials with their age, the failures with their error.
    """
    columns = (*State, WAITING)
    rows = [("experiment", *map(str, columns), "time left")]
    for standing in standings(found, asked, now):
        left = "not known yet" if standing.left is None else (f"about {clock(standing.left)}" if standing.left else "-")
        rows.append((standing.experiment, *(str(standing.counts[state]) for state in columns), left))
    yield from terminal.in_columns(rows)
    for name, one in found.items():
        if one.state == State.running:
            yield f"running for {clock(max(0.0, now - _modified(one.folder, now)))}: {name}"
    failed = [(name, one) for name, one in found.items() if one.state in (State.failed, State.damaged, State.stale)]
    for name, one in failed[:MOST_FAILURES]:
        yield f"{one.state}: {name}: {one.detail}"
    if len(failed) > MOST_FAILURES:
        yield f"and {len(failed) - MOST_FAILURES} more"


def _modified(path: Path, otherwise: float) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it has moved on meanwhile
        return otherwise


if __name__ == "__main__":
    sys.exit(run_command(main))
