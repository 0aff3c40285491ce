"""Progress of many trials: one bar in a terminal, else now and then a line."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_SECONDS = 10.0  # at least so long between two plain lines
LEAST_WORK = 0.02  # trials, before a time left is told


class Progress(Protocol):
    """Something that tells how far the trials are."""

    def show(self, *, done: int, running: int, failed: int, elsewhere: int, under_way: float) -> None:
        """The state of all trials: `elsewhere` are run by another process; `under_way`: of the running ones' work, in trials."""
        ...

    def note(self, text: str) -> None:
        """Print something that stays, on stderr."""
        ...


@contextmanager
def open_progress(*, total: int, skipped: int) -> Iterator[Progress]:
    """A bar when stdout is a terminal, else lines; `skipped` trials are finished from the start and cost no time."""
    if skipped:
        print(f"{skipped} of {total} trials are finished already.", flush=True)
    if not sys.stdout.isatty():
        yield _Lines(total, skipped)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Rich

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("left"))
    with Rich(*columns, TimeRemainingColumn()) as bar:
        yield _Bar(bar, bar.add_task("starting", total=total, completed=skipped))


@dataclass
class _Bar:
    bar: RichProgress
    task: TaskID

    def show(self, *, done: int, running: int, failed: int, elsewhere: int, under_way: float) -> None:
        self.bar.update(self.task, completed=done + failed + under_way, description=_counts(running, failed, elsewhere))

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # rich puts it above the bar


@dataclass
class _Lines:
    total: int
    skipped: int
    started: float = field(default_factory=time.monotonic)
    last: float = -math.inf

    def show(self, *, done: int, running: int, failed: int, elsewhere: int, under_way: float) -> None:
        now = time.monotonic()
        if now - self.last < LINE_SECONDS:
            return
        self.last = now
        ended = done + failed
        elapsed = now - self.started
        work = ended - self.skipped + under_way  # in trials
        left = (self.total - ended - under_way) * elapsed / work if work > LEAST_WORK else None
        times = f"{clock(elapsed)} elapsed, " + (f"about {clock(left)} left" if left is not None else "time left not known yet")
        so_far = f"{ended}/{self.total} ended" + (f" ({under_way:.0%} done)" if self.total == 1 and not ended else "")
        print(f"{so_far}, {_counts(running, failed, elsewhere)}, {times}", flush=True)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _counts(running: int, failed: int, elsewhere: int) -> str:
    return f"{running} running, {failed} failed" + (f", {elsewhere} run by another process" if elsewhere else "")


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`.

    >>> clock(3723.4), clock(9)
    ('1:02:03', '0:09')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
