"""The conclusion as text for a terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from harness.audit.report.conclusion import Conclusion
from harness.audit.report.remedies import remedy
from harness.audit.report.values import short

WIDTH = 130
NUMBERS = ("N", "steps", "largest distance", "gate there", "scale", "cosine")


def text(conclusion: Conclusion) -> str:
    """A table of the arms, then every finding with its remedy, and what could not be judged or seen."""
    output = io.StringIO()
    console = Console(file=output, width=WIDTH, force_terminal=False, color_system=None)
    console.print(f"audit of batches of {conclusion.batch_size}: {conclusion.status}", highlight=False)
    if conclusion.results:
        console.print(_table(conclusion))
    for finding in conclusion.findings:
        console.print(f"N={finding.accumulation_steps}{finding.since}: {finding.cause}", highlight=False, markup=False)
        console.print(f"    {finding.message}", highlight=False, markup=False)
        console.print(f"    remedy: {remedy(finding.cause)}", highlight=False, markup=False)
    for title, lines in (("could not be judged", conclusion.problems), ("could not be seen", conclusion.hidden)):
        for line in lines:
            console.print(f"{title}: {line}", highlight=False, markup=False)
    return output.getvalue()


def _table(conclusion: Conclusion) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("N", "arithmetic", "optimizer", "steps", "largest distance", "gate there", "scale", "cosine", "causes"):
        table.add_column(name, justify="right" if name in NUMBERS else "left")
    for line in conclusion.lines:
        step = line.farthest
        numbers = ("",) * 4 if step is None else (step.raw.distance, step.gate, step.raw.scale, step.raw.cosine)
        cells = [str(line.arm.accumulation_steps), line.arm.arithmetic, line.facts.run.track, line.steps]
        table.add_row(*cells, *(short(number) for number in numbers), line.verdict)
    return table
