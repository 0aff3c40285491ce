"""Progress of many trials, on stderr: one bar in a terminal, else now and then a line."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

Kind = tuple[str, ...]  # what trials of one length have in common
LINE_SECONDS = 10.0  # at least so long between two plain lines
UNKNOWN = "time left not known yet"


class TimeLeft:
    """How long trials will take, from those of their kind that have ended: nothing else is known of them.

    A kind has trials of one length but for their size: `ended` and `estimate` are told both.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[Kind, float] = defaultdict(float)
        self._size: defaultdict[Kind, float] = defaultdict(float)

    def ended(self, kind: Kind, size: float, seconds: float) -> None:
        """A trial of that kind took so long."""
        self._seconds[kind] += seconds
        self._size[kind] += size

    def estimate(self, left: Iterable[tuple[Kind, float, float]], at_once: int) -> str:
        """Estimate how long the trials that are left will take.

        >>> known = TimeLeft()
        >>> known.estimate([(("text",), 100, 0)], at_once=1)
        'time left not known yet'
        >>> known.ended(("text",), size=100, seconds=60)
        >>> known.estimate([(("text",), 100, 20), (("text",), 200, 0)], at_once=2)
        'about 1:20 left'
        >>> known.estimate([(("text",), 200, 0), (("digits",), 100, 0)], at_once=1)
        'about 2:00 left for 1 of 2 trials, not known yet for the others'

        Args:
            left: Kind, size and the seconds that it has run so far, of each trial that has not ended.
            at_once: How many run at the same time.

        Returns:
            `about 3:20 left`; no number for trials of a kind of which none has ended.
        """
        of_each = [
            self._seconds[kind] * size / self._size[kind] - run if self._size.get(kind) else None for kind, size, run in left
        ]
        known = [max(0.0, seconds) for seconds in of_each if seconds is not None]
        if of_each and not known:
            return UNKNOWN
        others = f" for {len(known)} of {len(of_each)} trials, not known yet for the others" if len(known) < len(of_each) else ""
        return f"about {clock(sum(known) / at_once)} left{others}"


class Progress(ExitStack):
    """How far the trials are; `skipped` ones are finished from the start and cost no time."""

    def __init__(self, *, total: int, skipped: int) -> None:
        super().__init__()
        if skipped:
            self.note(f"{skipped} of {total} trials are finished already.")
        self._total = total
        self._began = time.monotonic()
        self._next_line = self._began
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=Console(stderr=True))
            self._bar = self.enter_context(bar)
            self._task = self._bar.add_task("starting", total=total, completed=skipped, left="")

    def show(self, *, done: int, running: int, failed: int, elsewhere: int, left: Callable[[], str]) -> None:
        """The state of all trials: `elsewhere` are run by another process; `left` says how long they take, if it is asked."""
        ended, now = done + failed, time.monotonic()
        counts = f"{running} running, {failed} failed" + (f", {elsewhere} run by another process" if elsewhere else "")
        if self._bar is not None:
            self._bar.update(self._task, completed=ended, description=counts, left=left() if ended < self._total else "")
        elif now >= self._next_line:
            self._next_line = now + LINE_SECONDS
            self.note(f"{ended}/{self._total} ended, {counts}, {clock(now - self._began)} elapsed, {left()}")

    def note(self, text: str) -> None:
        """Print something that stays; rich puts it above the bar."""
        print(text, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Write seconds as `1:02:03` or `2:03`.

    >>> clock(3723.4), clock(9)
    ('1:02:03', '0:09')

    Args:
        seconds: A duration; fractions are dropped.

    Returns:
        Hours where there are any, minutes and seconds.
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
