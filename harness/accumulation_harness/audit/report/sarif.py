"""The conclusion as SARIF 2.1.0, for code scanning: a result per finding, a notification per problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.report.conclusion import Conclusion
from accumulation_harness.audit.report.subject import TOOL, Subject
from accumulation_harness.judge import sarif
from accumulation_harness.judge.status import Status, plain


def text(conclusion: Conclusion) -> str:
    """One run. Findings are at their own line, or else at the `def` of the audited function, where that is known.

    Args:
        conclusion: What the audit concluded.

    Returns:
        A SARIF 2.1.0 document.
    """
    subject = conclusion.subject
    where, function = ([], "") if subject is None else ([_location(subject)], subject.name)
    told = [("error", line) for line in conclusion.problems] + [("note", line) for line in conclusion.hidden]
    invocation = {
        "executionSuccessful": conclusion.verdict is not Status.inconclusive,
        "exitCode": conclusion.exit_code,
        "toolExecutionNotifications": [{"level": level, "message": {"text": line}, "locations": where} for level, line in told],
    }
    results = [
        {
            "ruleId": f.cause,
            "level": "error",
            "message": {"text": f"N={f.accumulation_steps}{f.since}: {f.message}"},
            "locations": _own_location(f, subject) or where,
            "partialFingerprints": {"functionCauseAndN/v1": f"{function} {f.cause} {f.accumulation_steps}"},
            "properties": {
                "accumulationSteps": f.accumulation_steps,
                "optimizerStep": f.optimizer_step,
                "evidence": plain(f.evidence),
            },
        }
        for f in conclusion.findings
    ]
    return sarif.text(TOOL, results, invocations=[invocation])


def _own_location(finding: Finding, subject: Subject | None) -> list[dict[str, Any]]:
    if finding.site is None:
        return []
    root = Path.cwd() if subject is None else subject.root
    return [sarif.place(Path(finding.site.file), root, startLine=finding.site.line)]


def _location(subject: Subject) -> dict[str, Any]:
    train = subject.train
    names = {"logicalLocations": [{"fullyQualifiedName": train.function, "kind": "function"}]} if train.function else {}
    return {**sarif.place(train.file, subject.root, startLine=train.line), **names}
