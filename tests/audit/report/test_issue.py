"""The issue names the versions, and its script runs without this tool and prints the distance of the table."""

import math
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.report import ArmResult, Report
from accumulation_harness.audit.report import reproduction as scripts
from accumulation_harness.audit.report.issue import MOST_LINES, text
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
    begins = "# Gradient accumulation changes what `train` computes: `loss_not_divided`\n" if wrong else "# No fault found"
    assert issue.startswith(begins)
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


def test_where_no_script_shows_it_the_issue_says_so():
    issue = text(Report(batch_size=16, results=(ARM,), problems=(), hidden=(), subject=SUBJECT))
    assert "There is no script without this tool" in issue and "They are not. With N=4, 4 \\| 1." in issue
    assert SUBJECT.command in issue and "--reference tests/audit/loops/right_loops.py:sgd_divided_by_n" in issue
    assert LOOPS.joinpath("wrong_loops.py").read_text().count("\n") > MOST_LINES
    assert "def not_divided(" in issue and "def divided_twice(" not in issue, "of a long file the function"


def test_a_script_is_run_where_it_changes_nothing(tmp_path):
    (tmp_path / "ckpt.pt").write_text("precious")
    printed = "print('optimizer steps: 1 of one batch, 2 of micro-batches')"
    script = f"import torch\nassert open('ckpt.pt').read() == 'precious'\ntorch.save(1, 'ckpt.pt')\nopen('new', 'w')\n{printed}"
    assert scripts._output(script, tmp_path, 60.0).startswith("optimizer steps: 1")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"] and (tmp_path / "ckpt.pt").read_text() == "precious"


def test_a_script_that_does_not_end_is_given_up(tmp_path):
    endless = "import subprocess, time\nprint('optimizer steps: 1 of one batch, 2 of micro-batches', flush=True)\n"
    output = scripts._output(endless + "subprocess.Popen(['sleep', '20'])\ntime.sleep(900)", tmp_path, 2.0)
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
