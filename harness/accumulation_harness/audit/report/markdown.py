"""The conclusion as markdown: a summary for a pull request or a job, and the parts that an issue shares with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.report.conclusion import Conclusion, Line
from accumulation_harness.audit.report.frameworks import change, meaning
from accumulation_harness.judge.status import short

HEAD = (
    "N",
    "arithmetic",
    "optimizer",
    "steps",
    "at step",
    "distance",
    "unclipped",
    "gate",
    "scale",
    "cosine",
    "learning rate",
    "verdict",
)
LEGEND = (
    "One line per number of micro-batches N, at the first optimizer step that differs, or else at the one nearest to its gate. "
    "Distance: ‖a - g‖ / ‖g‖ of the gradient a that the optimizer takes from g, that of one batch; unclipped, with scale and "
    "cosine: the same before clipping. Gate: the largest distance that rounding explains in this function, measured by running "
    "it again, perturbed by one unit of rounding."
)


def text(conclusion: Conclusion) -> str:
    """Status, table, findings with their remedies, what could not be judged, and what could not be seen.

    Args:
        conclusion: What the audit concluded.

    Returns:
        Markdown.
    """
    subject = conclusion.subject
    what = "" if subject is None else f"{code(subject.name)}: "
    parts = [
        f"### Gradient accumulation: {conclusion.verdict}",
        f"{what}batches of {conclusion.batch_size}, as one batch and as N micro-batches.",
        *([table(conclusion.lines), LEGEND] if conclusion.results else []),
    ]
    for cause, findings in conclusion.causes.items():
        parts += [
            f"**{code(cause)}**: {escaped(meaning(findings[0]).sentence)}.",
            found(conclusion, findings),
            f"Remedy: {change(conclusion, findings[0])}",
        ]
    if conclusion.allowed:
        parts += [
            "**Allowed**",
            listed(f"{code(f.cause)} at N={f.accumulation_steps}: {escaped(f.message)}" for f in conclusion.allowed),
        ]
    if conclusion.problems:
        parts += ["**What could not be judged**", listed(code(line) for line in conclusion.problems)]
    if conclusion.notes:
        parts += ["**Notes**", listed(escaped(line) for line in conclusion.notes)]
    if conclusion.hidden:
        hidden = listed(escaped(line) for line in conclusion.hidden)
        parts.append(f"<details><summary>What this run could not have shown</summary>\n\n{hidden}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def table(lines: Iterable[Line]) -> str:
    """A table of the arms.

    Args:
        lines: The arms.

    Returns:
        Lines without a last line end.
    """
    rows: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*rows, *(_cells(line) for line in lines)])


def _cells(line: Line) -> list[str]:
    step = line.first
    numbers = [""] * 7
    if step is not None:
        rate, reference_rate = line.rates(step)
        moved = short(rate) if rate == reference_rate else f"{rate:.6g} (N=1: {reference_rate:.6g})"
        measured = (step.consumed.distance, step.raw.distance, step.gate, step.raw.scale, step.raw.cosine)
        numbers = [str(step.step), *map(short, measured), moved]
    cells = [str(line.arm.accumulation_steps), line.arm.arithmetic, line.facts.run.track, line.steps, *numbers, line.said]
    return [escaped(cell) for cell in cells]


def found(conclusion: Conclusion, findings: Iterable[Finding]) -> str:
    """A list of what was found, by N, and at which line.

    Args:
        conclusion: What the audit concluded.
        findings: Those that are listed.

    Returns:
        Items of a Markdown list.
    """
    places = ((f, conclusion.where(f)) for f in findings)
    return listed(
        f"N={f.accumulation_steps}{f.since}: {escaped(f.message)}" + (f" ({code(where)})" if where else "") for f, where in places
    )


def listed(lines: Iterable[str]) -> str:
    """One item per line.

    Args:
        lines: The items.

    Returns:
        Lines joined.
    """
    return "\n".join(f"- {line}" for line in lines)


def escaped(words: str) -> str:
    r"""Put a text on one line, without what Markdown or HTML would make something of.

    >>> escaped("|a| < b*c")
    '\\|a\\| &lt; b\\*c'

    Args:
        words: Any text.

    Returns:
        The text for a cell of a table.
    """
    line = " ".join(words.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*|\[\]])", r"\\\1", line)


def code(words: str) -> str:
    """On one line, as it stands; a name in it is no mention of a user.

    Args:
        words: Any text.

    Returns:
        The text between as many backticks as it needs.
    """
    line = " ".join(words.split())
    ticks = "`" * (1 + _longest_run(line))
    padding = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{padding}{line}{padding}{ticks}"


def block(words: str, language: str = "") -> str:
    """Fence a block of text.

    Args:
        words: Any text.
        language: Its language, for colours.

    Returns:
        The block, fenced by as many backticks as it needs.
    """
    fence = "`" * max(3, 1 + _longest_run(words))
    return f"{fence}{language}\n{words.rstrip()}\n{fence}"


def _longest_run(words: str) -> int:
    return max((len(run) for run in re.findall("`+", words)), default=0)
