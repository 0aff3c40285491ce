"""Status and report of a store, called in this process and stopped where they do not end."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from accumulation_harness.analysis import report
from accumulation_harness.sweep import status
from tests.chaos.campaign import Broken

SECONDS = 120.0
TABLES = ("verdicts.csv", "claims.csv", "faults.csv")


@dataclass(frozen=True)
class Said:
    """What a command printed, and wrote to `out`."""

    code: int
    text: str
    out: Path

    @property
    def tables(self) -> dict[str, bytes]:
        """The CSV files that are there."""
        return {name: (self.out / name).read_bytes() for name in TABLES if (self.out / name).exists()}

    @property
    def page(self) -> str:
        """All pages in one text, the entry first; empty where there are none."""
        entry = self.out / "index.html"
        return "".join(path.read_text(encoding="utf-8") for path in [entry, *sorted(self.out.rglob("*.html"))] if entry.exists())


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises Broken inside what takes longer."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Broken(f"no end within {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def reported(results: Path, out: Path) -> Said:
    """What the report says; Broken where there is neither a whole report nor one line that says why."""
    said = _said(lambda: report.main(["--results", str(results), "--out", str(out)]), out)
    if said.code == 0 and not {"verdicts.csv", "claims.csv", "index.html"} <= {path.name for path in out.iterdir()}:
        raise Broken(f"a report that is not whole: {said.text}")
    if said.code == 1 and len(said.text.strip().splitlines()) != 1:
        raise Broken(f"no report, and not one line: {said.text}")
    return said


def status_of(results: Path) -> Said:
    """What `status` says."""
    return _said(lambda: status.main(["--results", str(results)]), results)


def _said(command: Callable[[], int], out: Path) -> Said:
    text = io.StringIO()
    with within(SECONDS), redirect_stdout(text), redirect_stderr(text):
        code = command()
    if code not in (0, 1):
        raise Broken(f"exit code {code}: {text.getvalue()}")
    return Said(code, text.getvalue(), out)
