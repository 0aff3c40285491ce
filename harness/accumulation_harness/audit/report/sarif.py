"""The conclusion as SARIF 2.1.0, for code scanning: a result per finding, a notification per problem.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.report.conclusion import Conclusion
from accumulation_harness.audit.report.remedies import Status, plain, remedy
from accumulation_harness.audit.report.subject import TOOL, Subject
from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.system.address import documentation
from accumulation_harness.system.packages import version

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def text(conclusion: Conclusion) -> str:
    """One run. Findings are at the `def` of the audited function, where that is known."""
    causes = list(conclusion.causes)
    driver: dict[str, Any] = {"name": TOOL, "rules": [_rule(cause) for cause in causes]}
    if number := version(TOOL):
        driver["version"] = number
    if site := documentation():
        driver["informationUri"] = site
    where = _locations(conclusion.subject)
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": conclusion.status is not Status.inconclusive,
                "exitCode": conclusion.exit_code,
                "toolExecutionNotifications": [
                    *(_notification("error", line, where) for line in conclusion.problems),
                    *(_notification("note", line, where) for line in conclusion.hidden),
                ],
            }
        ],
        "results": [_result(finding, causes.index(finding.cause), conclusion, where) for finding in conclusion.findings],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False)


def _rule(cause: Cause) -> dict[str, Any]:
    meaning = MEANINGS[cause]
    rule = {
        "id": cause,
        "name": "".join(word.capitalize() for word in cause.split("_")),
        "shortDescription": {"text": f"{cause.replace('_', ' ').capitalize()}"},
        "fullDescription": {"text": f"{meaning.sentence[0].upper()}{meaning.sentence[1:]}."},
        "help": {"text": meaning.remedy, "markdown": meaning.remedy},
        "defaultConfiguration": {"level": "error"},
    }
    return {**rule, "helpUri": remedy(cause)} if documentation() else rule  # a URI is absolute


def _result(finding: Finding, rule: int, conclusion: Conclusion, where: list[dict[str, Any]]) -> dict[str, Any]:
    n = finding.accumulation_steps
    function = "" if conclusion.subject is None else conclusion.subject.name
    return {
        "ruleId": finding.cause,
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": f"N={n}{finding.since}: {finding.message}"},
        "locations": where,
        "partialFingerprints": {"functionCauseAndN/v1": f"{function} {finding.cause} {n}"},
        "properties": {"accumulationSteps": n, "optimizerStep": finding.optimizer_step, "evidence": plain(finding.evidence)},
    }


def _notification(level: str, line: str, where: list[dict[str, Any]]) -> dict[str, Any]:
    return {"level": level, "message": {"text": line}, "locations": where}


def _locations(subject: Subject | None) -> list[dict[str, Any]]:
    if subject is None:
        return []
    path = subject.train.seen_from(subject.root)
    if subject.train.file.is_relative_to(subject.root):
        artifact = {"uri": quote(path), "uriBaseId": "%SRCROOT%"}
    else:
        artifact = {"uri": subject.train.file.as_uri()}
    region = {"startLine": subject.train.line}
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": artifact, "region": region}}
    if subject.train.function:  # none of a script
        location["logicalLocations"] = [{"fullyQualifiedName": subject.train.function, "kind": "function"}]
    return [location]
