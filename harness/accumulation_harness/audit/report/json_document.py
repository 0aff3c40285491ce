"""The conclusion as JSON, of a size that an agent can read."""

from __future__ import annotations

import json
from typing import Any

from accumulation_harness.audit.report.conclusion import Conclusion, Line
from accumulation_harness.audit.report.frameworks import change
from accumulation_harness.audit.report.remedies import Status, plain, remedy
from accumulation_harness.judge.cause import MEANINGS, Cause

MOST_BYTES = 64 * 1024  # of the text
MOST_ITEMS = 16  # of a list, where the whole would be longer


def document(conclusion: Conclusion) -> dict[str, Any]:
    """In JSON types; numbers that are not finite are None."""
    subject = conclusion.subject
    return {
        "verdict": conclusion.verdict,
        "equivalent": conclusion.equivalent,
        "exit_code": conclusion.exit_code,
        "batch_size": conclusion.batch_size,
        "command": None if subject is None else subject.command,
        "findings": [
            {
                "accumulation_steps": f.accumulation_steps,
                "optimizer_step": f.optimizer_step,
                "cause": f.cause,
                "message": f.message,
                "evidence": plain(f.evidence),
                "change": change(conclusion, f.cause),
                "remedy": remedy(f.cause),
            }
            for f in conclusion.findings
        ],
        "allowed": [
            {"accumulation_steps": f.accumulation_steps, "cause": f.cause, "message": f.message} for f in conclusion.allowed
        ],
        "problems": list(conclusion.problems),
        "hidden": list(conclusion.hidden),
        "notes": list(conclusion.notes),
        "next": _next_experiment(conclusion),
        "arms": [
            {
                "accumulation_steps": r.accumulation_steps,
                "arithmetic": r.arithmetic,
                "verdict": conclusion.verdict_of(r),
                "evidence": plain(r.evidence),
                "weights": [weights for line in conclusion.lines if line.arm is r and (weights := _weights(line))],
                "causes": sorted({f.cause for f in r.findings}),
            }
            for r in conclusion.results
        ],
        "steps": plain(conclusion.steps),
    }


def _next_experiment(conclusion: Conclusion) -> str:
    """The experiment that would tell most after this one: what to change, and what the same audit must say then."""
    if conclusion.verdict is Status.inconclusive:
        why = conclusion.problems[0] if conclusion.problems else "nothing was compared"
        return f"Nothing may be concluded yet. Remove the reason, and repeat the audit: {why}"
    if conclusion.verdict is Status.different:
        cause = next(iter(conclusion.causes))
        if cause is Cause.unexplained:
            return MEANINGS[cause].remedy
        if MEANINGS[cause].of_the_model:
            return f"No loop can fix this: {MEANINGS[cause].remedy} Repeat the audit with that model: it must say equivalent."
        others = len(conclusion.causes) - 1
        rest = f" {others} more findings may be its consequences, or faults of their own." * (others > 0)
        return f"{change(conclusion, cause)} Repeat the audit: {cause} must be gone.{rest}"
    changes = [change for line in conclusion.hidden for _, found, change in [line.rpartition("; ")] if found]
    if changes:
        return f"What was compared agrees. To see more: {changes[0]}."
    return "What was compared agrees. Repeat the audit with other N, and with the model's own size."


def _weights(line: Line) -> dict[str, Any]:
    """What each micro-batch counted in the first step that differs, and what would have been right."""
    step = line.first
    if step is None or not step.taken.weights:
        return {}
    return {
        "optimizer": line.facts.run.track,
        "optimizer_step": step.step,
        "taken": plain(step.taken.weights),
        "right": plain(step.parts.weights),
    }


def text(conclusion: Conclusion) -> str:
    """Strict JSON: a non-finite number is written as null. At most `MOST_BYTES`; how much was left out is said."""
    whole = document(conclusion)
    written = _written(whole)
    rows, most = whole["steps"], len(whole["steps"])
    while len(written) > MOST_BYTES and most > 1:
        most //= 2
        whole["steps"] = _worst(rows, most)
        written = _written(_shortened({**whole, "steps_left_out": len(rows) - most}))
    return written


def _written(content: Any) -> str:
    return json.dumps(content, indent=1, allow_nan=False)


def _worst(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Those that are farthest beyond their gate, in their order."""
    by_distance = sorted(range(len(rows)), key=lambda k: (rows[k]["distance"] or 0.0) / (rows[k]["gate"] or 1.0), reverse=True)
    return [rows[k] for k in sorted(by_distance[:most])]


def _shortened(value: Any, key: str = "") -> Any:
    """With lists cut, but for the rows, which are chosen."""
    if isinstance(value, dict):
        return {name: _shortened(item, name) for name, item in value.items()}
    if isinstance(value, list):
        kept = value if key == "steps" and value and isinstance(value[0], dict) else value[:MOST_ITEMS]
        return [_shortened(item) for item in kept] + ([f"and {len(value) - len(kept)} more"] if len(kept) < len(value) else [])
    return value[:2000] if isinstance(value, str) else value
