"""Every format says the same of a right and of a wrong loop, and of what could not be judged, and others can read it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from accumulation_harness.audit import Report
from accumulation_harness.audit.__main__ import main
from accumulation_harness.audit.formats import ENDINGS, TO_STDOUT
from accumulation_harness.audit.report import junit, markdown
from accumulation_harness.audit.report.report import TELLERS
from accumulation_harness.audit.report.subject import Place, Subject
from accumulation_harness.judge.cause import MEANINGS
from tests.audit.report.audited import LINE, SIZES, WRONG, said

REQUIRED = {  # of the schema of SARIF 2.1.0: definition -> members it must have
    "sarifLog": ("version", "runs"),
    "run": ("tool",),
    "tool": ("driver",),
    "toolComponent": ("name",),
    "reportingDescriptor": ("id",),
    "result": ("message",),
    "message": ("text",),  # or an id
    "invocation": ("executionSuccessful",),
    "notification": ("message",),
}


def test_the_formats_are_those_that_can_be_told() -> None:
    assert {*TO_STDOUT, *ENDINGS.values()} == TELLERS.keys()


def test_annotations_and_summary_of_a_job(folder: Path, wrong: bool) -> None:
    code, out, err = json.loads((folder / "answer").read_text())
    commands = [line for line in out.splitlines() if line.startswith("::")]
    assert (code, len(commands), err) == ((1, 2, "") if wrong else (0, 0, ""))
    for line in commands:
        found = re.fullmatch(r"::error file=([^,:]+),line=(\d+),title=N=\d%3A loss_not_divided::(.+)", line)
        assert found is not None and found[1] == f"{WRONG}/loop.py" and int(found[2]) == LINE and "%0A" in found[3], line
    summary = (folder / "summary").read_text()
    assert summary.strip() == (folder / "a.md").read_text().strip()
    assert ("loss_not_divided" in summary) == wrong and f"accumulation: {'different' if wrong else 'equivalent'}" in summary


def test_junit_has_a_case_per_number_of_micro_batches(folder: Path, wrong: bool) -> None:
    root = ElementTree.fromstring((folder / "a.xml").read_bytes())
    suite = root.find("testsuite")
    assert root.tag == "testsuites" and suite is not None
    for counted in (root, suite):
        assert [counted.get(key) for key in ("tests", "failures", "errors")] == ["2", "2" if wrong else "0", "0"]
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == ["N=2, as trained", "N=4, as trained"]
    assert {case.get("classname") for case in cases} == {"loop.train"}
    for case in cases:
        failure = case.find("failure")
        assert (failure is not None) == wrong
        if failure is not None:
            assert failure.get("type") == "loss_not_divided" and failure.get("message") and failure.text
        assert "rounding explains" in str(case.findtext("system-out"))


def missing(kind: str, value: Any) -> list[str]:
    return [f"{kind}.{name}" for name in REQUIRED[kind] if name not in value]


def lacks(log: dict[str, Any]) -> list[str]:
    """What the log lacks of what the schema requires."""
    absent = missing("sarifLog", log)
    for run in log["runs"]:
        driver = run["tool"]["driver"]
        absent += missing("run", run) + missing("tool", run["tool"]) + missing("toolComponent", driver)
        for rule in driver["rules"]:
            absent += missing("reportingDescriptor", rule)
            absent += [
                name for part in ("shortDescription", "fullDescription", "help") for name in missing("message", rule[part])
            ]
        for invocation in run["invocations"]:
            absent += missing("invocation", invocation)
            for notification in invocation["toolExecutionNotifications"]:
                absent += missing("notification", notification) + missing("message", notification["message"])
        for result in run["results"]:
            absent += missing("result", result) + missing("message", result["message"])
    return absent


def test_sarif_has_a_result_per_finding_at_the_function(folder: Path, wrong: bool) -> None:
    log = json.loads((folder / "a.sarif").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert log["version"] == "2.1.0" and lacks(log) == []
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == (["loss_not_divided"] if wrong else [])
    assert run["invocations"][0]["executionSuccessful"] and len(run["results"]) == (2 if wrong else 0)
    for result in run["results"]:
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"] == {"uri": f"{WRONG}/loop.py", "uriBaseId": "%SRCROOT%"}
        assert place["region"]["startLine"] == LINE and rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert len({json.dumps(result["partialFingerprints"]) for result in run["results"]}) == len(run["results"])


def test_what_sarif_lacks_is_noticed() -> None:
    log = json.loads(Report(batch_size=4, results=(), problems=("x",), hidden=()).told("sarif"))
    del log["runs"][0]["tool"]["driver"]["name"], log["runs"][0]["invocations"][0]["executionSuccessful"]
    assert lacks(log) == ["toolComponent.name", "invocation.executionSuccessful"]


def test_markdown_has_the_table_and_the_remedy(folder: Path, wrong: bool) -> None:
    told = (folder / "a.md").read_text()
    rows = [line for line in told.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({row.count(" | ") for row in rows}) == 1
    assert (MEANINGS["loss_not_divided"].remedy in told) == wrong


SUBJECT = Subject(
    train=Place.of("there is none.py:train"), batch_size=8, accumulation_steps=(2, 4), folder=Path.cwd(), packages=("torch",)
)
UNJUDGED = Report(
    batch_size=8,
    results=(),
    problems=("N=2: raised ValueError: \x1b[31ma\x00 | `b` <i> 100%\n::error::x", "N=4: no step"),
    hidden=("nothing",),
    subject=SUBJECT,
)


def test_what_could_not_be_judged_is_no_success_in_any_format(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "inconclusive" in UNJUDGED.told("text") and "inconclusive" in UNJUDGED.told("html")
    root = ElementTree.fromstring(UNJUDGED.told("junit"))
    assert [root.get(key) for key in ("tests", "failures", "errors")] == ["2", "0", "2"]
    assert [error.text is not None and error.text[:4] for error in root.iter("error")] == ["N=2:", "N=4:"]
    (run,) = json.loads(UNJUDGED.told("sarif"))["runs"]
    assert not run["invocations"][0]["executionSuccessful"] and run["invocations"][0]["exitCode"] == 2
    assert [item["level"] for item in run["invocations"][0]["toolExecutionNotifications"]] == ["error", "error", "note"]
    told = UNJUDGED.told("markdown")
    assert "inconclusive" in told and "`` N=2" not in told and "``N=2: raised" in told
    assert ElementTree.fromstring(Report(batch_size=8, results=(), problems=("x",), hidden=()).told("junit")).get("errors") == "1"


def test_a_problem_of_one_arm_leaves_the_others_alone() -> None:
    assert UNJUDGED.problems_of(4) == ("N=4: no step",) and len(UNJUDGED.problems_of(2)) == 1
    everything = Report(batch_size=8, results=(), problems=("N=1: no step", "not deterministic"), hidden=())
    assert len(everything.problems_of(4)) == 2


def test_annotations_cannot_be_cut_short_by_what_they_quote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from accumulation_harness.audit.report import github

    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    assert github.tell(UNJUDGED) == "" and not (tmp_path / "summary").exists(), "not in a job"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    lines = github.tell(UNJUDGED).splitlines()
    assert len(lines) == 2 and all(line.startswith("::error file=") for line in lines) and "100%25%0A::error" in lines[0]
    github.tell(UNJUDGED)
    assert (tmp_path / "summary").read_text().count("inconclusive") == 2, "a summary is added to"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "summary"))
    assert github.tell(UNJUDGED).splitlines()[-1].startswith("::warning title=no summary::")


@pytest.mark.parametrize("format", [name for name in TO_STDOUT if name != "text"])
def test_a_refusal_is_a_document_of_the_format(format: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    code, out, err = said("none.py:train", "--format", format, "--save", "a.sarif", "--report", "issue.md")
    assert not json.loads((tmp_path / "a.sarif").read_text())["runs"][0]["invocations"][0]["executionSuccessful"]
    assert (tmp_path / "issue.md").read_text().startswith("# It could not be judged")
    assert code == 2 and "audit could not run" in out and err.splitlines()[-1].startswith("audit could not run: ValueError")
    assert err.startswith("::error file=none.py,line=1,") and "::error" not in out
    if format in ("json", "sarif"):
        json.loads(out)
    if format == "junit":
        assert ElementTree.fromstring(out).get("errors") == "2"


@pytest.mark.slow
def test_a_process_that_ends_is_a_document_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text("import os; os._exit(0)")
    assert main(["loop.py:train", *SIZES, "--format", "junit"]) == 2
    output = capsys.readouterr()
    assert ElementTree.fromstring(output.out).get("errors") == "2" and output.err.count("\n") == 1


def test_markdown_of_odd_words() -> None:
    assert markdown.code("a`b") == "``a`b``" and markdown.code("`a`") == "`` `a` ``"
    assert markdown.block("```\nx\n```").startswith("````\n")
    assert markdown.escaped("a\n| b") == "a \\| b"


def test_xml_takes_what_xml_has_no_character_for() -> None:
    odd = Report(batch_size=8, results=(), problems=("\x00\x1b\ud800 <&>",), hidden=())
    error = next(ElementTree.fromstring(junit.text(odd)).iter("error"))
    assert error.text == "��� <&>"
