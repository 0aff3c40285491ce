"""The conclusion as JSON, of a size that an agent can read; what may be quoted comes first."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.report.conclusion import Conclusion, Line
from accumulation_harness.audit.report.figure import known
from accumulation_harness.audit.report.frameworks import change, meaning
from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.judge.remedy import patch
from accumulation_harness.judge.status import Status, plain, short
from accumulation_harness.system.address import page_of

MOST_BYTES = 64 * 1024  # of the text
MOST_ITEMS = 16  # of a list in it, and fewer where it would be longer
NUMBERS = re.compile(r"\[\s+([-+.\w,\s]*?)\s+\]")  # a list that holds nothing else


def document(conclusion: Conclusion) -> dict[str, Any]:
    """In JSON types; numbers that are not finite are None.

    Args:
        conclusion: What the audit concluded.

    Returns:
        A tree of dicts, lists, texts and finite numbers.
    """
    subject = conclusion.subject
    return {
        "verdict": conclusion.verdict,
        "exit_code": conclusion.exit_code,
        "conclusion": _quoted(conclusion),
        "next": _next_experiment(conclusion),
        "findings": [
            {
                "accumulation_steps": f.accumulation_steps,
                "optimizer_step": f.optimizer_step,
                "cause": f.cause,
                "message": f.message,
                "location": _location(conclusion, f),
                "change": change(conclusion, f),
                "patch": patch(f.cause),
                "remedy": page_of(f.cause),
                "evidence": plain(f.evidence),
            }
            for f in conclusion.findings
        ],
        "allowed": [
            {"accumulation_steps": f.accumulation_steps, "cause": f.cause, "message": f.message} for f in conclusion.allowed
        ],
        "problems": list(conclusion.problems),
        "hidden": [{"what": one.what, "sentence": one.sentence, "change": one.change} for one in conclusion.hidden],
        "notes": list(conclusion.notes),
        "batch_size": conclusion.batch_size,
        "command": None if subject is None else subject.command,
        "arms": [
            {
                "accumulation_steps": r.accumulation_steps,
                "arithmetic": r.arithmetic,
                "verdict": conclusion.verdict_of(r),
                "causes": sorted({f.cause for f in r.findings}),
                "weights": [weights for line in conclusion.lines if line.arm is r and (weights := _weights(line))],
                "evidence": plain(r.evidence),
            }
            for r in conclusion.results
        ],
        "steps": plain([row for line in conclusion.lines for row in _steps(line)]),
    }


def _quoted(conclusion: Conclusion) -> str:
    """What may be said of the code after this audit, in sentences that stand by themselves."""
    subject = conclusion.subject
    what = "the function" if subject is None else subject.name
    if conclusion.verdict is Status.inconclusive:
        why = conclusion.problems[0] if conclusion.problems else "nothing was compared"
        return f"Of {what}, nothing may be concluded about gradient accumulation: {why}"
    apart = sorted({f.accumulation_steps for f in conclusion.findings})
    compared = sorted({r.accumulation_steps for r in conclusion.results} - {1})
    sizes = ", ".join(f"{n} micro-batches of {conclusion.batch_size // n}" for n in apart or compared)
    if not apart:
        return f"{what} trains with {sizes} as with one batch of {conclusion.batch_size}{_agreeing(conclusion)}"
    said = [f"{what} computes with {sizes} something else than with one batch of {conclusion.batch_size}."]
    for cause, (first, *_) in conclusion.causes.items():
        where = conclusion.where(first)
        said.append(f"{cause}: {first.message}{f' (at {where})' if where else ''}.")
    if all(MEANINGS[cause].of_the_model for cause in conclusion.causes):
        said.append("That is a property of the model or its loss, and no fault of the loop.")
    return " ".join(said)


def _agreeing(conclusion: Conclusion) -> str:
    """The end of a sentence: how well, besides what was allowed, and what could not have shown."""
    worst = max(conclusion.steps, key=lambda row: row["distance"] / row["gate"] if row["gate"] else 0.0)
    besides = ", ".join(sorted({f.cause for f in conclusion.allowed}))
    numbers = f"largest distance {short(worst['distance'])}; rounding explains {short(worst['gate'])}"
    agree = f"all gradients and updates agree up to rounding ({numbers})"
    unseen = ", ".join(dict.fromkeys(one.what.replace("_", " ") for one in conclusion.hidden))
    return (f", besides what was allowed ({besides}): no other difference was found." if besides else f": {agree}.") + (
        f" This run could not show: {unseen}." if unseen else ""
    )


def _location(conclusion: Conclusion, finding: Finding) -> dict[str, Any] | None:
    if finding.location is None:
        return None
    site, call, text = finding.location
    file, line = conclusion.seen_file(site), site.line or None
    return {"file": file, "line": line, "text": text, "call": call, "through": site.through or None}


def _next_experiment(conclusion: Conclusion) -> str:
    """The experiment that would tell most after this one: what to change, and what the same audit must say then."""
    if conclusion.verdict is Status.inconclusive:
        return "Nothing may be concluded yet. Remove the reason, and repeat the audit."
    if conclusion.verdict is Status.different:
        cause, (finding, *_) = next(iter(conclusion.causes.items()))
        if cause is Cause.unexplained:
            return meaning(finding).remedy
        if MEANINGS[cause].of_the_model:
            return f"No loop can fix this: {MEANINGS[cause].remedy} Repeat the audit with that model: it must say equivalent."
        others = len(conclusion.causes) - 1
        rest = f" {others} more findings may be its consequences, or faults of their own." * (others > 0)
        return f"Change what the first finding says. Repeat the audit: {cause} must be gone.{rest}"
    changes = [one.change for one in conclusion.hidden if one.change]
    if changes:
        return f"What was compared agrees. To see more: {changes[0]}."
    return "What was compared agrees. Repeat the audit with other N, and with the model's own size."


def _weights(line: Line) -> dict[str, Any]:
    """What each micro-batch counted in the first step that differs, and what would have been right; nothing where unknown."""
    step = line.first
    if step is None or not (known(step, step.taken) and known(step, step.parts)):
        return {}
    return {
        "optimizer": line.facts.run.track,
        "optimizer_step": step.step,
        "taken": plain(step.taken.weights),
        "right": plain(step.parts.weights),
    }


def _steps(line: Line) -> Iterator[dict[str, Any]]:
    """The first that differs, the one farthest beyond its gate, and the last."""
    chosen = {step.step: step for step in (line.first, line.farthest, *line.facts.steps[-1:]) if step is not None}
    for _, step in sorted(chosen.items()):
        row = next(line.rows(step))
        del row["tensor"]
        yield row


def text(conclusion: Conclusion) -> str:
    """Strict JSON: a non-finite number is written as null. At most `MOST_BYTES`; how much was left out is said.

    Args:
        conclusion: What the audit concluded.

    Returns:
        The JSON.
    """
    whole, most = document(conclusion), MOST_ITEMS
    while len(written := _written(_shortened(whole, most))) > MOST_BYTES and most > 1:
        most //= 2
    return written


def _written(content: Any) -> str:
    return NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(content, indent=1, allow_nan=False))


def _shortened(value: Any, most: int) -> Any:
    """With lists cut, and how much of each was left out beside it; texts cut, and numbers to six digits."""
    if isinstance(value, dict):
        made: dict[str, Any] = {}
        for name, item in value.items():
            made[name] = _shortened(item, most)
            if isinstance(item, list) and len(item) > most:
                made[f"{name}_left_out"] = len(item) - most
        return made
    if isinstance(value, list):
        return [_shortened(item, most) for item in value[:most]]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value[: 125 * most] if isinstance(value, str) else value
