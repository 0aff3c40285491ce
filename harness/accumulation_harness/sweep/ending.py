"""What a sweep says at its end: the verdicts by cell, the caveats that occurred, where the results are, what to type next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from accumulation_harness.config.arm_name import ACCUMULATED, PERMUTED
from accumulation_harness.judge.verdict import Outcome
from accumulation_harness.results.cells import ArmCell, by_cell, caveats, control_failed, spread
from accumulation_harness.results.judged_arm import VERDICT_COLUMNS, VerdictRow
from accumulation_harness.results.record import StoreError, in_one_line, read_trial
from accumulation_harness.sweep.child import Cell
from accumulation_harness.system.terminal import in_columns

MOST_ROWS = 40  # of the table
MOST_TRIALS = 5_000  # that are read for it
HEAD = ("workload", "norm", "optimizer", "precision", "N", "verdict", "cause", "gradient error")


def lines(cells: Sequence[Cell]) -> Iterator[str]:
    """Say how a sweep ended; only trials that are finished and whole are read.

    Args:
        cells: Its trials.

    Yields:
        The lines: verdicts by cell, caveats, the folder and the next command.
    """
    if not cells:
        return
    found: dict[str, list[VerdictRow]] = {}
    for cell in cells[:MOST_TRIALS]:
        if (rows := _rows(cell.folder)) is not None:
            found.setdefault(cell.config.experiment, []).extend(rows)
    if not found:
        yield "No trial has finished, so there is nothing to report; accumulation-harness status lists the trials."
        return
    judged = {name: by_cell(rows) for name, rows in found.items() if rows}
    for name, table in judged.items():
        yield from _of_many(name, table) if len(judged) > 1 else _table(table)
    for name in (name for name in found if name not in judged):
        yield f"{name}: its trials give no verdicts; the report shows what they measured."
    for caveat in caveats([cell for table in judged.values() for cell in table]):
        yield f"! {caveat}"
    for wrong in (control for table in judged.values() for control in control_failed(table)):
        yield f"! {' '.join(wrong.name)}: the control (the large batch, its rows shuffled) differs: no verdict beside it counts."
    if len(cells) > MOST_TRIALS:
        yield f"The first {MOST_TRIALS} trials are shown; the report has all."
    root = cells[0].store.root
    yield f"The results are in {root}/. Next: accumulation-harness report" + (
        "" if str(root) == "results" else f" --results {root}"
    )


def _rows(folder: Path) -> list[VerdictRow] | None:
    """The verdicts of a trial, an empty list where it judges no arm; None where it has not finished, or is damaged."""
    with suppress(FileNotFoundError, StoreError):
        return [VerdictRow(**{name: arm[name] for name in VERDICT_COLUMNS}) for arm in read_trial(folder).arms]
    return None


def _table(cells: Sequence[ArmCell]) -> Iterator[str]:
    """Every cell but the controls, those that differ in N alone together; of many, those that are not equivalent first."""
    alike: dict[tuple[str, ...], list[ArmCell]] = defaultdict(list)
    for cell in cells:
        if cell.arm != PERMUTED:
            share = "" if cell.trials == 1 else f" ({cell.agreeing} of {cell.trials})"
            alike[(*cell.name, cell.arm, cell.verdict + share, cell.cause or "-")].append(cell)
    shown = list(alike)
    if len(shown) > MOST_ROWS:
        shown.sort(key=lambda key: alike[key][0].verdict == Outcome.equivalent)
    yield from map(in_one_line, in_columns([HEAD, *(_row(key, alike[key]) for key in shown[:MOST_ROWS])]))
    if len(shown) > MOST_ROWS:
        left = Counter(alike[key][0].verdict for key in shown[MOST_ROWS:])
        yield f"and {', '.join(f'{count} {verdict}' for verdict, count in left.items())} rows more, in the report"


def _row(key: tuple[str, ...], cells: Sequence[ArmCell]) -> tuple[str, ...]:
    """Numbers of micro-batches N that agree in all but the size of the difference, in one row."""
    *name, arm, verdict, cause = key
    numbers = ",".join(str(cell.accumulation_steps) for cell in cells)
    return (
        *name,
        numbers if arm == ACCUMULATED else f"{numbers} {arm}",
        verdict,
        cause,
        spread(cell.algebra_error for cell in cells),
    )


def _of_many(name: str, cells: Iterable[ArmCell]) -> Iterator[str]:
    """One experiment of several, in a line."""
    counts = Counter(cell.verdict for cell in cells if cell.arm == ACCUMULATED)
    yield f"{name}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}"
