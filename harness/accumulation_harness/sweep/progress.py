"""Progress of many trials: one bar in a terminal, else now and then a line."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from typing_extensions import Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

LINE_SECONDS = 10.0  # at least so long between two plain lines


class Progress:
    """How far the trials are; `skipped` ones are finished from the start and cost no time."""

    def __init__(self, *, total: int, skipped: int) -> None:
        if skipped:
            print(f"{skipped} of {total} trials are finished already.", flush=True)
        self._total, self._skipped = total, skipped
        self._began = time.monotonic()
        self._next_line = self._began
        self._bar: Bar | None = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TextColumn("left"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn())
            self._task = self._bar.add_task("starting", total=total, completed=skipped)

    def show(self, *, done: int, running: int, failed: int, elsewhere: int) -> None:
        """The state of all trials: `elsewhere` are run by another process."""
        ended, now = done + failed, time.monotonic()
        counts = f"{running} running, {failed} failed" + (f", {elsewhere} run by another process" if elsewhere else "")
        if self._bar is not None:
            self._bar.update(self._task, completed=ended, description=counts)
        elif now >= self._next_line:
            self._next_line = now + LINE_SECONDS
            elapsed, work = now - self._began, ended - self._skipped
            left = f"about {clock((self._total - ended) * elapsed / work)} left" if work else "time left not known yet"
            print(f"{ended}/{self._total} ended, {counts}, {clock(elapsed)} elapsed, {left}", flush=True)

    def note(self, text: str) -> None:
        """Print something that stays, on stderr; rich puts it above the bar."""
        print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`.

    >>> clock(3723.4), clock(9)
    ('1:02:03', '0:09')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
