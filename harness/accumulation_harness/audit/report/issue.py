"""The conclusion as an issue that somebody who has never heard of this tool can act on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accumulation_harness.audit.report.conclusion import Conclusion
from accumulation_harness.audit.report.figure import charts, lines
from accumulation_harness.audit.report.frameworks import change, meaning
from accumulation_harness.audit.report.markdown import LEGEND, block, code, escaped, found, listed, table
from accumulation_harness.audit.report.reproduction import NAME, Reproduction, is_tried, reproduction
from accumulation_harness.audit.report.subject import Subject
from accumulation_harness.judge.status import Status, short
from accumulation_harness.system.address import page_of

SCRIPT_SECONDS = 60.0
MOST_LINES = 300  # of a source file that is put into the issue


def text(conclusion: Conclusion) -> str:
    """Write an issue: title, summary, versions, script, table, causes with remedies, limits, source of the function.

    The script is run, for at most a minute beside the seconds that the audit took.

    Args:
        conclusion: What the audit says.

    Returns:
        Markdown.

    Raises:
        ValueError: The audited function stands in no file.
    """
    subject = conclusion.subject
    if subject is None:
        raise ValueError("expected a function in a file, which an issue is about")
    reproduced = reproduction(conclusion, SCRIPT_SECONDS + conclusion.seconds)
    parts = [
        f"# {_title(conclusion, subject)}",
        *_summary(conclusion, subject, reproduced),
        "## Versions",
        listed(f"{name} {escaped(version)}" for name, version in subject.versions(conclusion.callers).items()),
        "## To reproduce",
        *_to_reproduce(conclusion, subject, reproduced),
        *(["## What was measured", table(conclusion.lines), LEGEND] if conclusion.results else []),
        *_figures(conclusion),
        *_causes(conclusion),
        *_limits(conclusion),
        *_source(subject),
    ]
    return "\n\n".join(parts) + "\n"


def _title(conclusion: Conclusion, subject: Subject) -> str:
    function = code(subject.train.function or subject.train.file.name)
    if conclusion.verdict is Status.different:
        causes = ", ".join(code(cause) for cause in conclusion.causes)
        return f"Gradient accumulation changes what {function} computes: {causes}"
    if conclusion.verdict is Status.equivalent:
        return f"No fault found: {function} computes the same with and without gradient accumulation"
    return f"It could not be judged whether gradient accumulation changes what {function} computes"


def _summary(conclusion: Conclusion, subject: Subject, reproduced: Reproduction | None) -> Iterator[str]:
    """What was compared, and the answer in one sentence."""
    baseline = f"one batch of {subject.batch_size}"
    if subject.reference is not None:
        baseline += f" by {code(subject.shown(subject.reference))}"
    sizes = [f"{n} of {subject.batch_size // n} rows" for n in subject.accumulation_steps]
    ranks = f", on {subject.processes} ranks" if subject.processes > 1 else ""
    yield (
        f"{code(subject.name)} was run with {baseline} per optimizer step, and with the same samples cut into micro-batches "
        f"({', '.join(sizes)}){ranks}. Both must be the same computation, up to rounding."
    )
    if conclusion.verdict is Status.equivalent:
        yield "They are: every gradient and every update agreed within what rounding was measured to explain in this function."
    elif conclusion.verdict is Status.inconclusive:
        yield "Whether they are could not be judged; what follows is no evidence of a fault, nor of its absence."
    else:
        yield f"They are not. {_difference(conclusion, reproduced)}"


def _difference(conclusion: Conclusion, reproduced: Reproduction | None) -> str:
    """What the script shows, as the audit saw it; the first finding where no script shows a distance."""
    if reproduced is None or reproduced.difference.step is None:
        first = conclusion.findings[0]
        return f"With N={first.accumulation_steps}, {escaped(first.message)}."
    seen = reproduced.difference
    return (
        f"With N={seen.arm.accumulation_steps}, the {seen.what} at optimizer step {seen.step} are {short(seen.expected)} away "
        f"from those of one batch, relative to their norm; rounding explains {short(seen.gate)}."
    )


def _to_reproduce(conclusion: Conclusion, subject: Subject, reproduced: Reproduction | None) -> Iterator[str]:
    if reproduced is not None:
        yield (
            f"Save as {code(NAME)} where {code(subject.train.seen_from(subject.folder))} is found by that path, and run "
            f"{code(f'python {NAME}')}. It needs torch and what that file imports, and not this tool."
        )
        yield block(reproduced.script, "python")
        yield "It was run after the audit, and printed"
        yield block(reproduced.output)
        if not reproduced.agrees:
            yield (
                f"The audit saw {short(reproduced.difference.expected)}. Where runs have diverged it puts both on the same "
                "weights before each step, and compares movements without what rounding alone moves; the script does not."
            )
    elif conclusion.verdict is Status.different:
        alone = "what was found does not show in one that watches the optimizer alone"
        why = alone if is_tried(subject) else "one is written where a function is audited, in one process"
        yield f"There is no script without this tool: {why}."
    yield f"With this tool: {code(subject.command)}"


def _figures(conclusion: Conclusion) -> Iterator[str]:
    for chart in charts(conclusion):
        title, *bars = lines(chart)
        yield f"## {title}"
        yield block("\n".join(bars))


def _causes(conclusion: Conclusion) -> Iterator[str]:
    for cause, findings in conclusion.causes.items():
        yield f"## Cause: {code(cause)}"
        yield f"{escaped(_sentence(meaning(findings[0]).sentence))}."
        yield found(conclusion, findings)
        yield f"Evidence at N={findings[0].accumulation_steps}:"
        yield listed(f"{escaped(key)}: {escaped(short(value))}" for key, value in findings[0].evidence.items())
        yield f"**Remedy.** {change(conclusion, findings[0])} ({code(page_of(cause))})"


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _limits(conclusion: Conclusion) -> Iterator[str]:
    if conclusion.problems:
        yield "## What could not be judged"
        yield listed(code(line) for line in conclusion.problems)
    if conclusion.hidden:
        yield "## What this run could not have shown"
        yield listed(escaped(line) for line in conclusion.hidden)


def _source(subject: Subject) -> Iterator[str]:
    """The whole file where it is short, otherwise the function."""
    place = subject.train
    whole = place.source.count("\n") <= MOST_LINES
    source = place.source if whole else ast.get_source_segment(place.source, place.definition) if place.definition else ""
    yield "## What was audited"
    yield f"{code(place.seen_from(subject.folder))}, line {place.line}" + ("" if whole else "; of a longer file")
    if source:
        yield f"<details><summary>{escaped(place.file.name)}</summary>\n\n{block(source, 'python')}\n\n</details>"
