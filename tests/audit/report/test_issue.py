"""The issue names the versions, and its script runs without this tool and prints the distance of the table."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.report import ArmResult, Report
from accumulation_harness.audit.report import reproduction as scripts
from accumulation_harness.audit.report.issue import MOST_LINES, text
from accumulation_harness.audit.report.reproduction import Difference, Reproduction
from accumulation_harness.audit.report.subject import Place, Subject
from accumulation_harness.judge.cause import MEANINGS, Cause
from tests.audit.report.audited import WRONG, said

MOST_SCRIPT_LINES = 25
LOOPS = Path(__file__).parents[1] / "loops"
ARM = ArmResult(4, "as trained", (), (Finding(4, 0, Cause.loss_not_divided, {}, "4 | 1", "gradient"),), {})
SUBJECT = Subject(
    train=Place(LOOPS / "wrong_loops.py", "not_divided"),
    reference=Place(LOOPS / "right_loops.py", "sgd_divided_by_n"),
    batch_size=16,
    accumulation_steps=(4,),
    folder=LOOPS.parents[2],
)


def fenced(issue: str, after: str) -> str:
    return issue.partition(after)[2].partition("```")[2].partition("\n")[2].partition("\n```")[0]


def rows(issue: str) -> list[dict[str, str]]:
    """Those of the table."""
    head, _, *lines = [line.strip("| ").split(" | ") for line in issue.splitlines() if line.startswith("|")]
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_the_issue_of_a_loop(folder: Path, wrong: bool) -> None:
    issue = (folder / "issue.md").read_text()
    assert f"- torch {torch.__version__}" in issue and "- Python 3" in issue and "- platform " in issue
    assert (folder / "loop.py").read_text().rstrip() in issue
    assert (MEANINGS[Cause.loss_not_divided].remedy in issue) == ("reproduce.py" in issue) == wrong
    if wrong:
        assert issue.startswith("# Gradient accumulation changes what `train` computes: `loss_not_divided`\n")
    else:
        assert issue.startswith("# No fault found") and "They are: " in issue
    for row in rows(issue):
        assert row["verdict"] == ("loss_not_divided" if wrong else "equivalent") and float(row["gate"]) < 1e-4
        assert (float(row["distance"]) > float(row["gate"])) == wrong


@pytest.mark.parametrize("folder", [WRONG], indirect=True)
def test_the_script_prints_the_distance_of_the_table(folder: Path, tmp_path: Path) -> None:
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


def test_an_issue_about_what_could_not_be_judged_says_so() -> None:
    report = Report(batch_size=16, results=(), problems=("N=4: raised",), hidden=(), subject=SUBJECT)
    issue = text(report, None)
    assert issue.startswith("# It could not be judged") and "no evidence of a fault" in issue and "`N=4: raised`" in issue
    assert "Remedy" not in issue and "|" not in issue


def test_where_no_script_shows_it_the_issue_says_so() -> None:
    report = Report(batch_size=16, results=(ARM,), problems=(), hidden=(), subject=SUBJECT)
    issue = text(report, None)
    assert "There is no script without this tool" in issue and "They are not. With N=4, 4 \\| 1." in issue
    assert SUBJECT.command in issue and "--reference tests/audit/loops/right_loops.py:sgd_divided_by_n" in issue
    assert LOOPS.joinpath("wrong_loops.py").read_text().count("\n") > MOST_LINES
    assert "def not_divided(" in issue and "def divided_twice(" not in issue, "of a long file the function"


def difference(**given: object) -> Difference:
    return replace(Difference(arm=ARM, place=0, step=1, what="gradients", taken=scripts.GRADIENTS), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"preparation": scripts.NO_CLIPPING},
        {"taken": scripts.RATES, "what": "learning rates"},
        {"taken": scripts.MOVEMENTS, "preparation": scripts.BEFORE, "what": "movements of the weights"},
        {"step": None},
        {"arm": replace(ARM, arithmetic="float64")},
    ],
)
def test_every_script_is_short_and_compiles(given: dict[str, object]) -> None:
    script = scripts._script(SUBJECT, difference(**given))
    compile(script, "reproduce.py", "exec")
    assert len(script.splitlines()) <= MOST_SCRIPT_LINES and max(map(len, script.splitlines())) <= 130
    assert ("dtype=torch.float64" in script) == ("arm" in given)


PRINTED = "optimizer steps: 4 of one batch, 4 of micro-batches\ngradients: ||a - g|| / ||g|| = {} at optimizer step 1"


@pytest.mark.parametrize(("distance", "shows", "agrees"), [("0.5", True, True), ("0.3", True, False), ("1e-7", False, False)])
def test_a_script_shows_what_is_above_the_gate(distance: str, shows: bool, agrees: bool) -> None:
    output, seen = PRINTED.format(distance), difference(gate=1e-6, expected=0.5)
    assert scripts._shows(output, seen) == shows
    assert Reproduction(script="", output=output, difference=seen).agrees == agrees
    assert not scripts._shows("", seen) and scripts._shows(PRINTED.format("nan"), seen)
    assert not scripts._shows(PRINTED, difference(step=None)), "equal numbers of steps"


def test_a_script_that_differs_from_the_audit_is_said_to() -> None:
    report = Report(batch_size=16, results=(ARM,), problems=(), hidden=(), subject=SUBJECT)
    made = Reproduction(script="pass", output=PRINTED.format("0.3"), difference=difference(gate=1e-6, expected=0.5))
    assert "The audit saw 0.5." in text(report, made)
    agreeing = replace(made, difference=difference(gate=1e-6, expected=0.3))
    assert "The audit saw" not in text(report, agreeing)


def test_a_script_that_does_not_end_is_given_up(tmp_path: Path) -> None:
    endless = "import subprocess, time\nprint('optimizer steps: 1 of one batch, 2 of micro-batches', flush=True)\n"
    output = scripts._output(endless + "subprocess.Popen(['sleep', '20'])\ntime.sleep(900)", tmp_path, 2.0)
    assert output.startswith("optimizer steps: 1"), "what it has printed by then counts"
    assert scripts._output("raise SystemExit", tmp_path, 20.0) == ""


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
def test_scripts_of_other_faults(
    loop: str, what: str | None, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(LOOPS.parents[2])
    issue = tmp_path / "issue.md"
    sizes = ("--batch-size", "16", "--accumulation-steps", "4")
    assert said(f"{LOOPS / 'wrong_loops.py'}:{loop}", *sizes, "--report", str(issue))[0] == 1
    told = issue.read_text()
    assert ("There is no script" in told) == (what is None)
    if what is not None:
        shown = re.search(rf"^{what}: .* = (\S+) at optimizer step", fenced(told, "and printed"), re.MULTILINE)
        assert shown is not None and math.isfinite(float(shown[1])) and ("The audit saw" in told) == (not same)
