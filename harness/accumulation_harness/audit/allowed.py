"""What may be said where findings were allowed beforehand: nothing is equivalent because of what was left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from accumulation_harness.audit.compare.run import steps_of
from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.report.conclusion import ArmResult, Problem
from accumulation_harness.audit.report.report import Report
from accumulation_harness.audit.rules.findings import first_of_each, left_out
from accumulation_harness.judge.cause import Cause

BESIDE = ("average", "statistics", "report")  # kinds of findings that kept no gradient and no update from being compared


def with_allowed(report: Report, causes: Collection[Cause]) -> Report:
    """Turn findings of allowed causes into remarks.

    Args:
        report: An audit's report.
        causes: The causes that are allowed.

    Returns:
        The report without these findings. An arm without others is equivalent where all besides them was compared and agreed;
        else it could not be judged.
    """
    results, problems = [], list(report.problems)
    for result in report.results:
        allowed = tuple(f for f in result.findings if f.cause in causes)
        rest = tuple(f for f in result.findings if f.cause not in causes)
        if allowed and not rest:
            rest = tuple(f for f in first_of_each(left_out(result.facts)) if f.cause not in causes)
            if not rest and (why := _unknown(allowed, result)):
                problems.append(Problem(why, result.accumulation_steps))
        results.append(replace(result, findings=rest, allowed=allowed))
    return replace(report, results=tuple(results), problems=tuple(dict.fromkeys(problems)))


def _unknown(allowed: Sequence[Finding], result: ArmResult) -> str:
    """What of the arm is not known, since only these were found; empty where all the rest was compared."""
    if all(f.kind == "layers" and f.alone for f in allowed):
        return ""
    names = ", ".join(sorted({f.cause for f in allowed}))
    if not all(step.agrees for step in steps_of(result.facts)) or any(
        f.kind not in (*BESIDE, "update", "schedule") for f in allowed
    ):
        what = "gradients were not compared"
    elif any(f.kind not in BESIDE or not f.is_named for f in allowed):
        what = "updates were not compared"
    else:
        return result.empty
    return f"{names} is allowed, and with it {what}: whatever else accumulation changes would not show"
