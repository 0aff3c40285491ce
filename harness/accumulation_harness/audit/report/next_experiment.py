"""The experiment that would tell most after this one, in a sentence."""

from __future__ import annotations

from accumulation_harness.audit.report.conclusion import Conclusion
from accumulation_harness.audit.report.frameworks import change
from accumulation_harness.audit.report.remedies import Status
from accumulation_harness.judge.cause import MEANINGS, Cause


def next_experiment(conclusion: Conclusion) -> str:
    """What to change, and what the same audit must say then."""
    if conclusion.status is Status.inconclusive:
        why = conclusion.problems[0] if conclusion.problems else "nothing was compared"
        return f"Nothing may be concluded yet. Remove the reason, and repeat the audit: {why}"
    if conclusion.status is Status.different:
        cause = next(iter(conclusion.causes))
        if cause is Cause.unexplained:
            return MEANINGS[cause].remedy
        if MEANINGS[cause].of_the_model:
            return f"No loop can mend this: {MEANINGS[cause].remedy} Repeat the audit with that model: it must say equivalent."
        others = len(conclusion.causes) - 1
        rest = f" {others} more findings may be its consequences, or faults of their own." * (others > 0)
        return f"{change(conclusion, cause)} Repeat the audit: {cause} must be gone.{rest}"
    changes = [change for line in conclusion.hidden for _, found, change in [line.rpartition("; ")] if found]
    if changes:
        return f"What was compared agrees. To see more: {changes[0]}."
    return "What was compared agrees. Repeat the audit with other N, and with the model's own size."
