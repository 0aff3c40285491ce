"""The conclusion as JUnit XML: one test case per number of accumulation steps and arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.report.conclusion import Conclusion
from accumulation_harness.audit.report.frameworks import change
from accumulation_harness.system.address import page_of

NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 has no character for
SUITE = "gradient accumulation"


def text(conclusion: Conclusion) -> str:
    """A failure is a finding, an error is what could not be judged.

    Args:
        conclusion: What the audit concluded.

    Returns:
        An XML document.
    """
    cases = list(_cases(conclusion))
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": str(sum(case.find("error") is not None for case in cases)),
    }
    root = Element("testsuites", {"name": SUITE, **counts})
    suite = SubElement(root, "testsuite", {"name": _class(conclusion), **counts, "skipped": "0"})
    suite.extend(cases)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _class(conclusion: Conclusion) -> str:
    """The function as a dotted name, which viewers cut into a tree: `folder.file.function`, or `folder.file` of a script."""
    subject = conclusion.subject
    if subject is None:
        return SUITE
    file = subject.train.seen_from(subject.folder).removesuffix(".py").strip("/").replace("/", ".")
    return _xml(f"{file}.{subject.train.function}".rstrip("."))


def _cases(conclusion: Conclusion) -> Iterator[Element]:
    """Those of the arms that ran, then of those that have no result."""
    for arm in conclusion.results:
        case = _case(conclusion, f"N={arm.accumulation_steps}, {arm.arithmetic}")
        if arm.findings:
            causes = ", ".join(dict.fromkeys(f.cause for f in arm.findings))
            details = "\n".join(_told(conclusion, finding) for finding in arm.findings)
            _add(case, "failure", causes, arm.findings[0].message, details)
        elif problems := conclusion.problems_of(arm.accumulation_steps):
            _inconclusive(case, problems)
        yield case
    ran = {arm.accumulation_steps for arm in conclusion.results}
    asked = set() if conclusion.subject is None else {*conclusion.subject.accumulation_steps} - {1} - ran
    unjudged = {f"N={n}, as trained": conclusion.problems_of(n) for n in sorted(asked)}
    for name, problems in (unjudged or ({} if ran else {"audit": conclusion.problems})).items():
        yield _inconclusive(_case(conclusion, name), problems or ("there is no result",))


def _told(conclusion: Conclusion, finding: Finding) -> str:
    where = conclusion.where(finding)
    said = f"{finding.cause}: {finding.message}\n" + (f"at {where}\n" if where else "")
    return f"{said}remedy: {change(conclusion, finding)} ({page_of(finding.cause)})"


def _case(conclusion: Conclusion, name: str) -> Element:
    return Element("testcase", {"classname": _class(conclusion), "name": _xml(name), "time": "0"})


def _add(case: Element, kind: str, type_: str, message: str, details: str) -> Element:
    SubElement(case, kind, {"type": type_, "message": _xml(" ".join(message.split()))}).text = _xml(details)
    return case


def _inconclusive(case: Element, problems: Sequence[str]) -> Element:
    return _add(case, "error", "inconclusive", problems[0], "\n".join(problems))


def _xml(words: str) -> str:
    return NO_XML.sub("�", words)
