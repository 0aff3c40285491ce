"""The conclusion as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from accumulation_harness.audit.report.conclusion import Conclusion, Line
from accumulation_harness.audit.report.figure import decisive, lines
from accumulation_harness.audit.report.frameworks import advice, meaning
from accumulation_harness.judge.status import short
from accumulation_harness.system.address import page_of

WIDTH = 130
COLUMNS = ("N", "arithmetic", "optimizer", "steps", "largest distance", "gate there", "scale", "cosine", "causes")
NUMBERS = ("N", "steps", "largest distance", "gate there", "scale", "cosine")


def text(conclusion: Conclusion) -> str:
    """A table of the arms, then every finding with its remedy, and what could not be judged or seen.

    Args:
        conclusion: What the audit concluded.

    Returns:
        Lines, each ended.
    """
    return "".join(f"{line.rstrip()}\n" for line in _lines(conclusion))


def _lines(conclusion: Conclusion) -> Iterator[str]:
    yield f"audit of batches of {conclusion.batch_size}: {conclusion.verdict}"
    if conclusion.results:
        yield from _table(conclusion)
    for finding in conclusion.findings:
        yield from _wrapped(f"N={finding.accumulation_steps}{finding.since}: {finding.cause}")
        yield from _wrapped(f"    {finding.message}")
        if where := conclusion.where(finding):
            yield from _wrapped(f"    at {where}")
        yield from _wrapped(f"    remedy: {meaning(finding).remedy} ({page_of(finding.cause)})")
        yield from _wrapped(f"    {advice(conclusion, finding.cause)}".rstrip())
    for chart in decisive(conclusion):
        yield from lines(chart)
    for finding in conclusion.allowed:
        yield from _wrapped(f"allowed: N={finding.accumulation_steps}{finding.since}: {finding.cause}: {finding.message}")
    for title, remarks in (
        ("could not be judged", conclusion.problems),
        ("could not be seen", conclusion.hidden),
        ("note", conclusion.notes),
    ):
        for line in remarks:
            yield from _wrapped(f"{title}: {line}")


def _wrapped(told: str) -> Iterator[str]:
    for line in told.splitlines():
        yield from textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]


def _table(conclusion: Conclusion) -> Iterator[str]:
    rows = [COLUMNS, *map(_cells, conclusion.lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        sides = (">" if name in NUMBERS else "<" for name in COLUMNS)
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)]
        yield (" ┃ " if row is COLUMNS else " │ ").join(cells)
        if row is COLUMNS:
            yield "━╇━".join("━" * width for width in widths)


def _cells(line: Line) -> tuple[str, ...]:
    step = line.farthest
    numbers = ("",) * 4 if step is None else (step.raw.distance, step.gate, step.raw.scale, step.raw.cosine)
    arm = line.arm
    return str(arm.accumulation_steps), arm.arithmetic, line.facts.run.track, line.steps, *map(short, numbers), line.said
