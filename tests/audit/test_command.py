"""The command: its exit code comes from what was judged, whatever the audited code does to its process; bad input is refused."""

import json
import subprocess
import sys

import pytest

from accumulation_harness.audit.__main__ import main
from accumulation_harness.audit.command import judge, parsed, parser
from tests.audit.loops import right_loops, wrong_loops
from tests.slow import slow

RIGHT, WRONG = f"{right_loops.__file__}:sgd_divided_by_n", f"{wrong_loops.__file__}:mean_of_means"
SIZES = ("--batch-size", "16", "--accumulation-steps", "4")
EXEC = "import os; os.execv('/bin/true', ['true'])"
FILE = """\
import torch
{at_import}

def train(batch_size, accumulation_steps):
    {before}
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        for k in range(accumulation_steps):
            rows = x[step * 16 + k * batch_size :][:batch_size]
            loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean() / {divisor}
            loss.backward()
            {within}
        optimizer.step()
        optimizer.zero_grad()
    {after}
"""
PARTS = dict.fromkeys(("at_import", "before", "within", "after"), "pass")


def audited(folder, **parts):
    file = folder / "code.py"
    file.write_text(FILE.format(**PARTS | {"divisor": "accumulation_steps"} | parts))
    return f"{file}:train"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing.py:train", *SIZES],
        ["right_loops", *SIZES],
        [RIGHT, *SIZES, "--accumulation-steps", "5"],
        [RIGHT, *SIZES, "--save", "no_such_folder/audit.json"],
        [RIGHT, *SIZES, "--save", "/tmp"],
        [RIGHT, *SIZES, "--accumulation-steps", "4;16"],
        [RIGHT, "--batch-size", "30"],
    ],
)
def test_what_cannot_be_run_is_exit_code_2(arguments, capsys):
    try:
        code, said, error = judge(parser().parse_args(arguments))
    except SystemExit as stopped:  # argparse
        code, said, error = int(stopped.code or 0), "", capsys.readouterr().err
    assert code == 2 and not said and ("expected" in error or "required" in error), error


SCRIPT = """\
import sys, torch
batch, n = int(sys.argv[sys.argv.index("--batch-size") + 1]), int(sys.argv[sys.argv.index("--accum") + 1])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for k, rows in enumerate(torch.randn(96, 4).split({size}), 1):
    (model(rows.repeat({times}, 1)).square().mean() / n).backward()
    if k % n == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("size", "times", "code"), [("batch", 1, 0), ("batch", 2, 0), ("8 + 0 * batch", 1, 2)])
def test_a_script_is_told_the_numbers_as_its_text_shows_unless_its_windows_are_others(size, times, code, tmp_path, monkeypatch):
    """A window may hold every row twice, as a discriminator's does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT.format(size=size, times=times))
    answer, said, _ = judge(parsed(["script.py"]))
    how = "--set '--batch-size {batch_size} --accum {accumulation_steps}'"
    assert (answer, "windows are not those" in said) == (code, code == 2), said
    assert f"script.py got the two numbers by {how}" in " ".join(said.split())


def test_the_command_says_and_saves(tmp_path, capfd):
    saved = tmp_path / "a.json"
    assert main([WRONG, *SIZES, "--save", str(saved)]) == 1
    out = capfd.readouterr().out
    assert "(accumulation-harness remedy mean_of_means)" in out and f"saved {saved}" in out
    read = json.loads(saved.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read["verdict"] == "different" and len(read["findings"][0]["evidence"]["right_weights"]) == 4


@pytest.mark.parametrize(
    ("place", "deed", "words"),
    [
        ("at_import", "import sys; sys.exit(0)", "SystemExit: 0"),
        ("at_import", "import no_such_module_at_all", "ModuleNotFoundError"),
        ("at_import", "raise KeyboardInterrupt", "KeyboardInterrupt"),
        slow("after", "import sys; sys.exit(None)", "SystemExit"),
        ("after", "import os; os._exit(0)", "os._exit(0)"),
        slow("within", "raise KeyboardInterrupt", "KeyboardInterrupt"),
        slow("within", "raise GeneratorExit", "GeneratorExit"),
    ],
)
def test_what_ends_the_audited_code_does_not_end_as_equivalent(tmp_path, place, deed, words):
    code, said, error = judge(parser().parse_args([audited(tmp_path, **{place: deed}), *SIZES]))
    assert code == 2 and words in " ".join((said + error).split()) and error.count("\n") <= 1


@pytest.mark.parametrize(
    ("place", "deed", "code", "words"),
    [
        ("at_import", "import os; os._exit(0)", 2, "ended its process (exit code 0)"),
        slow("before", EXEC, 2, "ended its process (exit code 0)"),
        slow("before", "import os; os.kill(os.getpid(), 9)", 2, "killed by SIGKILL"),
        slow("before", "import os; os.fork()", 0, "equivalent"),
    ],
)
def test_what_ends_its_process_does_not_end_the_command(tmp_path, capfd, place, deed, code, words):
    assert main([audited(tmp_path, **{place: deed}), *SIZES]) == code
    output = capfd.readouterr()
    assert words in output.out + output.err and "Traceback" not in output.err


@pytest.mark.slow
@pytest.mark.parametrize("divisor", ["accumulation_steps", "1"])
def test_threads_and_processes_that_never_end_do_not_hold_it(tmp_path, divisor):
    threads = "import threading, time, subprocess; threading.Thread(target=time.sleep, args=(900,)).start(); "
    target = audited(tmp_path, at_import=threads + "subprocess.Popen(['sleep', '900'])", divisor=divisor)
    done = subprocess.run(
        [sys.executable, "-m", "accumulation_harness.audit", target, *SIZES], timeout=120, capture_output=True, check=False
    )
    assert done.returncode == (0 if divisor == "accumulation_steps" else 1), done
