"""Every format says the same of a right and of a wrong loop, and of what could not be judged, and others can read it.

The issue names the versions, and its script runs without this tool and prints the distance of the table.
"""

import ast
import gc
import json
import math
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

from accumulation_harness.audit import Report
from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.report import COLUMNS, ArmResult, Problem, Unseen, github
from accumulation_harness.audit.report import reproduction as scripts
from accumulation_harness.audit.report.issue import MOST_LINES
from accumulation_harness.audit.report.subject import Place, Subject
from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.lint.hit import Hit
from tests.audit.report.audited import LINE, RIGHT, WRONG, said, write


def strict(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.fixture(scope="module", params=[RIGHT, WRONG])
def folder(request, tmp_path_factory):
    """Where a right or a wrong loop was audited in a job of GitHub, with all that was written; its name is the divisor."""
    made = tmp_path_factory.mktemp("job") / str(request.param)
    made.mkdir()
    gc.freeze()  # what the tests hold need not be looked through in every run
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        for name, value in {"ACTIONS": "true", "STEP_SUMMARY": str(made / "summary"), "WORKSPACE": str(made.parent)}.items():
            patch.setenv(f"GITHUB_{name}", value)
        saves = [word for name in ("a.sarif", "a.xml", "a.md", "a.json") for word in ("--save", name)] + ["--report", "issue.md"]
        code, out, err = said(write(made, made.name), *saves)
    (made / "answer").write_text(json.dumps([code, out, err]))
    return made


@pytest.fixture
def wrong(folder):
    return folder.name == WRONG


@pytest.mark.slow
def test_annotations_and_summary_of_a_job(folder, wrong):
    code, out, err = json.loads((folder / "answer").read_text())
    commands = [line for line in out.splitlines() if line.startswith("::")]
    assert (code, len(commands), err) == ((1, 2, "") if wrong else (0, 0, ""))
    for line in commands:
        found = re.fullmatch(r"::error file=([^,:]+),line=(\d+),title=N=\d%3A loss_not_divided::(.+)", line)
        assert found is not None and found[1] == f"{WRONG}/loop.py" and int(found[2]) == LINE and "%0A" in found[3], line
    told = (folder / "a.md").read_text()
    assert (folder / "summary").read_text().strip() == told.strip()
    rows = [line for line in told.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({row.count(" | ") for row in rows}) == 1
    assert (MEANINGS["loss_not_divided"].remedy in told) == wrong


def test_junit_has_a_case_per_number_of_micro_batches(folder, wrong):
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
        assert failure is None or (failure.get("type") == "loss_not_divided" and failure.get("message") and failure.text)


def test_sarif_has_a_result_per_finding_at_its_line(folder, wrong):
    """With all that the schema of SARIF 2.1.0 requires where it is given."""
    log = strict((folder / "a.sarif").read_text())
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert log["version"] == "2.1.0" and run["tool"]["driver"]["name"]
    assert [rule["id"] for rule in rules] == (["loss_not_divided"] if wrong else [])
    assert all(rule[name]["text"] for rule in rules for name in ("shortDescription", "fullDescription", "help"))
    assert all(one["message"]["text"] for one in (*run["results"], *run["invocations"][0]["toolExecutionNotifications"]))
    assert run["invocations"][0]["executionSuccessful"] and len(run["results"]) == (2 if wrong else 0)
    for result in run["results"]:
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"] == {"uri": f"{WRONG}/loop.py", "uriBaseId": "%SRCROOT%"}
        assert place["region"]["startLine"] == LINE and rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert len({json.dumps(result["partialFingerprints"]) for result in run["results"]}) == len(run["results"])


def test_json_has_the_decisive_rows_and_says_what_each_micro_batch_counted_and_what_to_do_next(folder, wrong):
    read = strict((folder / "a.json").read_text())
    assert (read["verdict"], read["batch_size"]) == ("different" if wrong else "equivalent", 8)
    assert [finding["cause"] for finding in read["findings"]] == ["loss_not_divided"] * (2 if wrong else 0)
    columns = [name for name in COLUMNS if name != "tensor"]
    assert 2 <= len(read["steps"]) <= 6 and all([*row] == columns and row["equivalent"] != wrong for row in read["steps"])
    assert (f"(at loop.py:{LINE}: (loss / 1)" in read["conclusion"]) == wrong
    assert all(one["what"] and one["sentence"] for one in read["hidden"])
    for finding in read["findings"]:
        assert finding["location"]["line"] == LINE and "+    loss = criterion(" in finding["patch"]
        assert finding["remedy"] == "accumulation-harness remedy loss_not_divided"
    for arm in read["arms"] if wrong else ():
        (weights,) = arm["weights"]
        assert weights["taken"] == pytest.approx([1] * arm["accumulation_steps"])
        assert weights["right"] == pytest.approx([1 / arm["accumulation_steps"]] * arm["accumulation_steps"])
    assert read["next"] and "audit loop.py:train --batch-size 8" in read["command"]
    long = Unseen("rows", "y" * 3000, "z" * 3000)
    told = Report(batch_size=8, results=(), problems=(Problem("x" * 10_000),) * 20, hidden=(long,) * 40).told("json")
    assert len(told) <= 64 * 1024, "no longer than an agent reads"
    assert json.loads(told)["hidden_left_out"] == 40 - len(json.loads(told)["hidden"]) > 0


SUBJECT = Subject(train=Place.of("there is none.py:train"), batch_size=8, accumulation_steps=(2, 4), folder=Path.cwd())
UNJUDGED = Report(
    batch_size=8,
    results=(),
    problems=(Problem("raised ValueError: \x1b[31ma\x00\ud800 | `b` <i> 100%\n::error::x", 2), Problem("no step", 4)),
    hidden=(Unseen("rows", "nothing"),),
    subject=SUBJECT,
)


def test_what_could_not_be_judged_is_no_success_in_any_format():
    assert "inconclusive" in UNJUDGED.told("text")
    root = ElementTree.fromstring(UNJUDGED.told("junit"))
    assert [root.get(key) for key in ("tests", "failures", "errors")] == ["2", "0", "2"]
    assert [error.text is not None and error.text[:4] for error in root.iter("error")] == ["N=2:", "N=4:"]
    (run,) = json.loads(UNJUDGED.told("sarif"))["runs"]
    assert not run["invocations"][0]["executionSuccessful"] and run["invocations"][0]["exitCode"] == 2
    assert [item["level"] for item in run["invocations"][0]["toolExecutionNotifications"]] == ["error", "error", "note"]
    told = UNJUDGED.told("markdown")
    assert "inconclusive" in told and "`` N=2" not in told and "``N=2: raised" in told
    everything = Report(batch_size=8, results=(), problems=(Problem("no step", 1), Problem("not deterministic")), hidden=())
    assert ElementTree.fromstring(everything.told("junit")).get("errors") == "1"
    assert len(everything.problems_of(4)) == 2 and UNJUDGED.problems_of(4) == UNJUDGED.problems[1:]


@pytest.mark.parametrize("site", ["", "https://docs.example/acc"])
def test_every_format_of_a_script_and_the_lint_cite_one_address(site, monkeypatch):
    monkeypatch.setenv("ACCUMULATION_HARNESS_DOCS", site)
    report = found("4 times too large", Place(Path(__file__), ""))
    page = f"{site}/causes/loss_not_divided.html" if site else "accumulation-harness remedy loss_not_divided"
    assert all(page in report.told(format) for format in ("text", "json", "junit", "issue"))
    assert page in Hit.at(ast.parse("x").body[0], Cause.loss_not_divided, "").told()
    assert "`test_formats.py`" in report.told("issue").partition("\n")[0] and 'report.test_formats"' in report.told("junit")
    (run,) = json.loads(report.told("sarif"))["runs"]
    driver = run["tool"]["driver"]
    assert "logicalLocations" not in run["results"][0]["locations"][0]
    assert driver.get("informationUri", "") == site, "a URI is absolute, or left out"
    assert driver["rules"][0].get("helpUri") == (page if site else None)


def test_annotations_cannot_be_cut_short_by_what_they_quote(monkeypatch, tmp_path):
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


def test_a_refusal_is_a_document_of_the_format(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    code, out, err = said("none.py:train", "--format", "junit", "--save", "a.sarif", "--report", "issue.md")
    assert not json.loads((tmp_path / "a.sarif").read_text())["runs"][0]["invocations"][0]["executionSuccessful"]
    assert (tmp_path / "issue.md").read_text().startswith("# It could not be judged")
    assert code == 2 and "audit could not run" in out and err.splitlines()[-1].startswith("audit could not run: ValueError")
    assert err.startswith("::error file=none.py,line=1,") and ElementTree.fromstring(out).get("errors") == "2"
    code, out, err = said("none.py:train", "--format", "issue")
    assert code == 2 and out.startswith("# It could not be judged") and "audit could not run" in err


MOST_SCRIPT_LINES = 25
LOOPS = Path(__file__).parents[1] / "loops"


def fenced(issue, after):
    return issue.partition(after)[2].partition("```")[2].partition("\n")[2].partition("\n```")[0]


def rows(issue):
    """Those of the table."""
    head, _, *lines = [line.strip("| ").split(" | ") for line in issue.splitlines() if line.startswith("|")]
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_the_issue_of_a_loop(folder, wrong):
    issue = (folder / "issue.md").read_text()
    assert f"- torch {version('torch')}" in issue and "- Python 3" in issue and "- platform " in issue
    assert (folder / "loop.py").read_text().rstrip() in issue
    assert (MEANINGS[Cause.loss_not_divided].remedy in issue) == ("reproduce.py" in issue) == wrong
    for row in rows(issue):
        assert row["verdict"] == ("loss_not_divided" if wrong else "equivalent") and float(row["gate"]) < 1e-4
        assert (float(row["distance"]) > float(row["gate"])) == wrong


@pytest.mark.parametrize("folder", [WRONG], indirect=True)
def test_the_script_prints_the_distance_of_the_table(folder, tmp_path):
    issue = (folder / "issue.md").read_text()
    script = fenced(issue, "## To reproduce")
    assert len(script.splitlines()) <= MOST_SCRIPT_LINES and "harness" not in script
    (tmp_path / "reproduce.py").write_text(script)
    shutil.copy(folder / "loop.py", tmp_path)
    done = subprocess.run([sys.executable, "reproduce.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fenced(issue, "and printed"), "what the issue says that it printed"
    printed = re.search(r"gradients: \|\|a - g\|\| / \|\|g\|\| = (\S+) at optimizer step 0", done.stdout)
    first = rows(issue)[0]
    assert printed is not None and first["N"] == "2" and first["distance"] == printed[1] == "1"


def found(message, place, reference=None):
    """The report of one finding, without what was compared."""
    arm = ArmResult(4, "as trained", (), (Finding(4, 0, Cause.loss_not_divided, {}, message, "gradient"),), {})
    subject = Subject(train=place, reference=reference, batch_size=16, accumulation_steps=(4,), folder=LOOPS.parents[2])
    return Report(batch_size=16, results=(arm,), problems=(), hidden=(), subject=subject)


def test_where_no_script_shows_it_the_issue_says_so():
    report = found("4 | 1", Place(LOOPS / "wrong_loops.py", "not_divided"), Place(LOOPS / "right_loops.py", "sgd_divided_by_n"))
    issue = report.told("issue")
    assert "There is no script without this tool" in issue and "They are not. With N=4, 4 \\| 1." in issue
    assert report.subject.command in issue and "--reference tests/audit/loops/right_loops.py:sgd_divided_by_n" in issue
    assert LOOPS.joinpath("wrong_loops.py").read_text().count("\n") > MOST_LINES
    assert "def not_divided(" in issue and "def divided_twice(" not in issue, "of a long file the function"


def test_a_script_is_run_where_it_changes_nothing(tmp_path):
    (tmp_path / "ckpt.pt").write_text("precious")
    printed = "print('optimizer steps: 1 of one batch, 2 of micro-batches')"
    script = f"assert open('ckpt.pt').read() == 'precious'\nopen('ckpt.pt', 'w').write('1')\nopen('new', 'w')\n{printed}"
    assert scripts._output(script, tmp_path, 60.0).startswith("optimizer steps: 1")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"] and (tmp_path / "ckpt.pt").read_text() == "precious"


@pytest.mark.slow  # a part of continuous integration
def test_a_script_that_does_not_end_is_given_up(tmp_path):
    endless = "import subprocess, time\nprint('optimizer steps: 1 of one batch, 2 of micro-batches', flush=True)\n"
    output = scripts._output(endless + "subprocess.Popen(['sleep', '20'])\ntime.sleep(900)", tmp_path, 10.0)
    assert output.startswith("optimizer steps: 1"), "what it has printed by then counts"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")  # at N=4 the schedule is the first to step
@pytest.mark.parametrize(
    ("loop", "what", "same"),
    [
        ("not_divided_adam_clipped", "gradients without clipping", True),
        ("clip_undivided", "gradients", True),
        ("tail_dropped", "gradients", True),
        ("schedule_inside", "learning rates", True),
        ("bias_correction_inside", "movements of the weights", True),
        ("state_inside", "movements of the weights", False),
        ("ema_inside", None, False),
    ],
)
def test_scripts_of_other_faults(loop, what, same, tmp_path, monkeypatch):
    monkeypatch.chdir(LOOPS.parents[2])
    issue = tmp_path / "issue.md"
    sizes = ("--batch-size", "16", "--accumulation-steps", "4")
    assert said(f"{LOOPS / 'wrong_loops.py'}:{loop}", *sizes, "--report", str(issue))[0] == 1
    told = issue.read_text()
    assert ("There is no script" in told) == (what is None)
    if what is not None:
        shown = re.search(rf"^{what}: .* = (\S+) at optimizer step", fenced(told, "and printed"), re.MULTILINE)
        assert shown is not None and math.isfinite(float(shown[1])) and ("The audit saw" in told) == (not same)
        script = fenced(told, "## To reproduce")
        assert len(script.splitlines()) <= MOST_SCRIPT_LINES and max(map(len, script.splitlines())) <= 130
