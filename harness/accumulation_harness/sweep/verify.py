"""`accumulation-harness verify [--results DIR]`: everything that should be true of a store, checked; exit code 1 where it is not.

Of each trial: its files against their checksums, its rows against what is said of them, the files that it has read; whether
something is left of an attempt or of a process that was killed; and the measurements that trials share. Nothing is changed.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from accumulation_harness.judge.verdict import Outcome
from accumulation_harness.results import measurements, sweeps
from accumulation_harness.results.judged_arm import VERDICT_COLUMNS
from accumulation_harness.results.record import StoredTrial, StoreError, in_one_line
from accumulation_harness.results.store import ATTEMPT, LOCKS, State, Status, Store, StoreWarning
from accumulation_harness.system import terminal
from accumulation_harness.system.files import PARTIAL
from accumulation_harness.system.processes import run_command

PROBE = ".filelock-probe-*"  # with which filelock tries a folder
PLACES = {  # of the store, and what is expected there; "": whatever lies there, but no link
    **dict.fromkeys(("*", "*/*"), ""),
    **dict.fromkeys((LOCKS, f"{LOCKS}/*", measurements.FOLDER, sweeps.FOLDER), "folder"),
    **dict.fromkeys((f"{LOCKS}/*/*", f"{measurements.FOLDER}/*.lock"), "file"),
}
WRONG = (State.damaged, State.stale)  # the others are on their way


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is wrong, a line each, and how many trials are in which state; exit code 1 where something is, 2 without any.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        0 where all is as it should be, 1 where something is wrong, 2 without a trial.
    """
    parser = terminal.parser("verify", __doc__)
    parser.add_argument("--results", type=Path, default="results", metavar="DIR", help="folder of the store (default: results)")
    root: Path = parser.parse_args(arguments).results
    store = Store(root)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", StoreWarning)
        statuses = [*store.status()]
    found = [str(one.message) for one in seen]
    found += [line for status in statuses for line in of_trial(store, status)]
    found += [*beside_trials(root)] if os.access(root, os.R_OK | os.X_OK) else []
    if not statuses and not found:
        print(f"{root}: no trials", file=sys.stderr)
        return 2
    for line in found:
        print(in_one_line(line))
    counts = Counter(str(status.state) for status in statuses)
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "or none that can be read"
    findings = f"{len(found)} finding{'s' * (len(found) > 1)}" if found else "all is as it should be"
    print(f"{len(statuses)} trial{'s' * (len(statuses) != 1)} ({states}): {findings}")
    return 1 if found else 0


def of_trial(store: Store, status: Status) -> Iterator[str]:
    """List what is wrong with one trial.

    Args:
        store: The store.
        status: Where the trial stands.

    Yields:
        A line each.
    """
    name = f"{status.experiment}/{status.trial}"
    if status.state in WRONG:
        yield f"{name}: {status.state}: {status.detail}"
    if status.state != State.finished or status.stored is None:
        return
    yield from (f"{name}: {wrong}" for wrong in _of_record(store, status.stored))
    names = [ATTEMPT[1], *(path.name for path in status.folder.glob(f"*{PARTIAL}"))]
    yield from (f"{name}: {left} is left over from another attempt" for left in names if (status.folder / left).exists())


def _of_record(store: Store, trial: StoredTrial) -> Iterator[str]:
    try:
        steps = store.steps(trial)
    except StoreError as error:  # whole by its checksum, and no table
        yield str(error)
        return
    if len(steps) != trial.record.get("steps"):
        yield f"steps.parquet has {len(steps)} rows, trial.json says {trial.record.get('steps')}"
    for arm in trial.arms:
        if missing := [column for column in VERDICT_COLUMNS if column not in arm]:
            yield f"an arm has no {', '.join(missing)}"
        elif arm["verdict"] not in [*Outcome] or (arm["experiment"], arm["trial"]) != (trial.experiment, trial.trial):
            yield f"an arm has an unknown verdict or another trial: {arm['verdict']} of {arm['experiment']}/{arm['trial']}"


def beside_trials(root: Path) -> Iterator[str]:
    """List what is wrong with the files that trials share.

    Args:
        root: The folder of the store.

    Yields:
        A line each.
    """
    for path in sorted((root / measurements.FOLDER).glob("*")):
        if path.suffix != ".lock" and not path.match(f"*{PARTIAL}") and not path.match(PROBE) and not measurements.is_whole(path):
            yield f"{path.relative_to(root)}: its checksum does not match; it is made again where it is needed"
    yield from sweeps.announced(root)[1]
    yield from _misplaced(root)
    for folder in (measurements.FOLDER, sweeps.FOLDER, LOCKS):
        yield from (
            f"{path.relative_to(root)} is left over from a process that was killed"
            for pattern in (f"*{PARTIAL}", PROBE)
            for path in (root / folder).rglob(pattern)
        )


def _misplaced(root: Path) -> Iterator[str]:
    """What lies where the store has a folder or a file, and is none: no process can write there."""
    found = {path: wanted for pattern, wanted in PLACES.items() for path in root.glob(pattern)}
    for path, wanted in sorted(found.items()):
        if path.is_symlink():
            yield f"{path.relative_to(root)}: is a link, through which nothing is written"
        elif wanted and not (path.is_dir() if wanted == "folder" else path.is_file()):
            yield f"{path.relative_to(root)}: expected a {wanted}, got something else"


if __name__ == "__main__":
    sys.exit(run_command(main))
