"""The action's own shell commands, run as a job of GitHub runs them; what pip would install is only noted."""

import os
import re
import subprocess
import sys

import pytest
import yaml

from tests.audit.report.audited import LINE, RIGHT, WRONG, write
from tests.commands import ENVIRONMENT, ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
PYTHON = """\
#!/bin/bash
if [ "$1 $2" = "-m pip" ]; then printf '%s\\n' "$@" > "$NOTED"; else exec "{python}" "$@"; fi
"""
COMMAND = '#!/bin/bash\nexec "{python}" -m accumulation_harness "$@"\n'
SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail")  # what `shell: bash` stands for


@pytest.fixture
def job(tmp_path):
    """Runs all steps in a folder as checkout, until one fails: the last of them, its output and the job's summary."""
    for name, script in (("python", PYTHON), ("accumulation-harness", COMMAND)):
        (tmp_path / name).write_text(script.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    github = {"ACTIONS": "true", "WORKSPACE": tmp_path, "OUTPUT": tmp_path / "output", "STEP_SUMMARY": tmp_path / "summary"}
    environment = {
        **os.environ,
        **ENVIRONMENT,
        **{f"GITHUB_{name}": str(value) for name, value in github.items()},
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "NOTED": str(tmp_path / "pip"),
    }

    def run(**given):
        """Inputs that are not given have their defaults."""
        inputs = {name: str(item.get("default", "")) for name, item in ACTION["inputs"].items()}
        inputs |= {name.replace("_", "-"): value for name, value in (SIZES | given).items()}
        contexts = {f"inputs.{name}": text for name, text in inputs.items()} | {"github.action_path": str(ROOT)}
        for step in ACTION["runs"]["steps"]:
            (tmp_path / "step.sh").write_text(step["run"])
            own = {  # `${{ ... }}` is replaced by GitHub before the shell starts
                name: re.sub(r"\$\{\{ *(.*?) *\}\}", lambda found: contexts[found[1]], value)
                for name, value in step["env"].items()
            }
            done = subprocess.run([*SHELL, "step.sh"], cwd=tmp_path, env=environment | own, capture_output=True, text=True)
            if done.returncode:
                break
        return done, (tmp_path / "output").read_text(), (tmp_path / "summary").read_text()

    return run


SIZES = {"batch_size": "8", "accumulation_steps": "4"}


def test_inputs_reach_the_shell_as_variables_alone():
    steps = ACTION["runs"]["steps"]
    assert ACTION["runs"]["using"] == "composite" and all(step["shell"] == "bash" for step in steps)
    assert not any("${{" in step["run"] for step in steps)
    used = {name for step in steps for value in step["env"].values() for name in re.findall(r"inputs\.([\w-]+)", value)}
    assert used == set(ACTION["inputs"])


def test_a_wrong_loop_fails_the_job_and_is_annotated(job, tmp_path):
    done, output, summary = job(function=write(tmp_path, WRONG), packages="a[b]>=1\n  c *", save="a.sarif\nwith blank.xml")
    assert done.returncode == 1 and output == "exit-code=1\n", done.stderr
    assert f"::error file=loop.py,line={LINE},title=N=4%3A loss_not_divided::" in done.stdout
    assert "### Gradient accumulation: different" in summary and "loss_not_divided" in summary
    assert (tmp_path / "a.sarif").is_file() and (tmp_path / "with blank.xml").is_file()
    installed = (tmp_path / "pip").read_text().splitlines()
    assert installed[-4:] == [str(ROOT), "a[b]>=1", "c", "*"], "neither cut nor expanded by the shell"


@pytest.mark.slow
def test_a_right_loop_passes(job, tmp_path):
    target = write(tmp_path, RIGHT)
    done, output, summary = job(function=target, reference=target, report="issue.md")
    assert done.returncode == 0 and output == "exit-code=0\n", done.stderr
    assert "::error" not in done.stdout and "### Gradient accumulation: equivalent" in summary
    assert (tmp_path / "issue.md").read_text().startswith("# No fault found")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", ["loop.py:none", '"; touch stolen; "', "$(touch stolen)", "--help", "`touch stolen`.py:train"]
)
def test_what_an_input_holds_is_not_run(job, tmp_path, function):
    write(tmp_path, RIGHT)
    done, output, summary = job(function=function)
    assert done.returncode == 2 and output == "exit-code=2\n", done
    assert done.stdout.startswith("::error file=") and "inconclusive" in summary
    assert not (tmp_path / "stolen").exists()
