"""Tasks of the user's own from the command line, in a folder that is none of ours."""

import json
from pathlib import Path

import pytest

from accumulation_harness.config import ConfigError, targets
from accumulation_harness.config.targets import data_fingerprint, digest_of
from accumulation_harness.results.store import Store
from tests.commands import ROOT, python
from tests.own import tasks

QUICK = (
    "effective_batch=8", "accumulation_steps=[2]", "steps=2", "algebra_steps=2", "tracking=disabled", "workers=2",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A user's folder: a task in a file and in a package, with a helper beside it; names that are also ours."""
    source = Path(tasks.__file__).read_text()
    (tmp_path / "mine.py").write_text(source.replace("SAMPLES = 40", "from helper import SHIFT\nSAMPLES = 40 + SHIFT"))
    (tmp_path / "helper.py").write_text("SHIFT = 0\n")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "__init__.py").write_text("")
    (tmp_path / "lab" / "vision.py").write_text(source)
    (tmp_path / "analysis.py").write_text("raise RuntimeError('this is not your analysis')\n")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("raise RuntimeError('these are not your experiments')\n")
    return tmp_path


def harness(folder, *overrides, code=0, **variables):
    program = "import sys; sys.path[0] = sys.argv.pop(1); from accumulation_harness.sweep.run import main; sys.exit(main())"
    return python("-c", program, ROOT, *overrides, *QUICK, cwd=folder, code=code, **variables)


def trials(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("results/*/*/trial.json")}


@pytest.mark.slow
def test_a_sweep_over_a_task_its_arguments_and_its_normalisation(folder):
    sweep = ("-m", "workload=custom", "workload.target=mine.py:Images", "+workload.args.width=4,5", "norm=group")
    run = harness(folder, *sweep)
    arms = [trial["arms"][0] for trial in trials(folder).values()]
    assert {arm["workload"] for arm in arms} == {"Images(width=4)", "Images(width=5)"} and not any(arm["cause"] for arm in arms)
    assert all(name.startswith("Images-group-sgd-float32-seed") for name in trials(folder)) and "Images(width=4)" in run.stdout
    again = harness(folder, *sweep)
    assert "Nothing to do: 2 trials finished already." in again.stdout


@pytest.mark.slow  # a part of continuous integration
def test_a_trial_counts_while_what_it_has_read_is_what_it_was(folder):
    """Also through a relative import inside a package; the trials of the changed code measure everything anew."""
    (folder / "lab" / "rate.py").write_text("RATE = 1.0\n")
    (folder / "lab" / "scaled.py").write_text(
        "from .rate import RATE\nfrom .vision import Images\n\n\nclass Scaled(Images):\n"
        "    def losses(self, outputs, batch):\n        return RATE * super().losses(outputs, batch)\n"
    )
    one = ("workload=custom", "workload.target=lab.scaled:Scaled")
    harness(folder, *one)
    assert "Nothing to do" in harness(folder, *one).stdout
    (folder / "lab" / "rate.py").write_text("RATE = 3.0\n")
    [stale] = Store(folder / "results").status()
    assert (stale.state, stale.detail) == ("stale", "lab/rate.py has changed")
    other = harness(folder, "-m", *one, "schedule.warmup_steps=0,1")
    assert f"run again: {stale.trial}: lab/rate.py has changed" in other.stderr
    assert {path.parent.name for path in folder.glob("results/*/*.stale-1/trial.json")} == {f"{stale.trial}.stale-1"}
    for one in Store(folder / "results").trials():
        made = {json.loads((folder / "results" / by / "trial.json").read_text())["files"]["lab/rate.py"]
                for by in one.record["measured_by"].values()}  # fmt: skip
        assert made == {one.record["files"]["lab/rate.py"]}, "a measurement of other code"


@pytest.mark.slow
def test_changed_data_are_another_trial_where_the_task_tells_of_them(folder):
    """Of data that are no file."""
    (folder / "told.py").write_text(
        "import os\nfrom lab.vision import Images\n\n\nclass Told(Images):\n"
        "    def __init__(self):\n        super().__init__(seed=int(os.environ['DATA']))\n\n"
        "    def fingerprint(self):\n        return int(os.environ['DATA'])\n"
    )
    one = ("workload=custom", "workload.target=told.py:Told")
    harness(folder, *one, DATA="0")
    assert "Nothing to do" in harness(folder, *one, DATA="0").stdout
    harness(folder, *one, DATA="1")
    assert len({trial["config"]["workload"]["source"] for trial in trials(folder).values()}) == 2
    assert "that gives a text; it raised ValueError: invalid literal" in harness(folder, *one, DATA="two", code=2).stderr


def test_a_fingerprint_is_asked_of_the_task_that_has_one(tmp_path):
    """Not of another task of the same file; what the file prints is none."""
    file = tmp_path / "both.py"
    file.write_text(
        "print('hello')\n\n\nclass Told:\n    def __init__(self, data=0):\n        self.data = data\n\n"
        "    def fingerprint(self):\n        return self.data\n\n\nclass Untold:\n    pass\n"
    )
    first, other = (data_fingerprint("workload.target", f"{file}:Told", f'{{"data": {data}}}') for data in (1, 2))
    assert first == digest_of(1) and other == digest_of(2) != first
    assert data_fingerprint("workload.target", f"{file}:Untold", "{}") == ""
    expected = f"^workload.target={file}:None: expected a class or function of that name; both.py has Told, Untold$"
    with pytest.raises(ConfigError, match=expected):
        data_fingerprint("workload.target", f"{file}:None", "{}")


@pytest.mark.slow
@pytest.mark.parametrize("does", ["subprocess.Popen(['sleep', '40'])", "os._exit(0)"])
def test_a_fingerprint_that_leaves_a_process_is_one_and_an_exit_is_none(tmp_path, monkeypatch, does):
    file = tmp_path / "told.py"
    file.write_text(f"import os, subprocess\n\n\nclass Told:\n    def fingerprint(self):\n        {does}\n        return 1\n")
    monkeypatch.setattr(targets, "MOST_SECONDS", 30)
    if "exit" not in does:
        assert data_fingerprint("workload.target", f"{file}:Told", "{}") == digest_of(1)
    else:
        with pytest.raises(ConfigError, match=r"fingerprint\(\) that gives a text; its process ended with exit code 0"):
            data_fingerprint("workload.target", f"{file}:Told", "{}")


@pytest.mark.slow
def test_a_package_and_yaml_of_ones_own(folder):
    conf = folder / "my_conf"
    for group, text in {
        "workload/mine.yaml": "data: custom\ntarget: lab.vision:Images\nargs: {width: 3}\n",
        "optimizer/slow.yaml": "name: sgd\nlr: 0.01\n",
        "experiment/first.yaml": (
            "# @package _global_\nexperiment: first\nhydra:\n  mode: MULTIRUN\n  sweeper:\n"
            "    grids:\n      - workload: mine\n        optimizer: slow\n        norm: as_is,none\n"
        ),
    }.items():
        (conf / group).parent.mkdir(parents=True, exist_ok=True)
        (conf / group).write_text(text)
    harness(folder, "--config-dir", conf, "+experiment=first")
    stored = [json.loads(path.read_text())["config"] for path in folder.glob("results/first/*/trial.json")]
    assert len(stored) == 2
    assert all(one["workload"]["args"] == {"width": 3} for one in stored), stored


BAD = {
    ("workload=custom", "workload.target=other.py:Images"): "there is no file other.py",
    ("workload=custom", "workload.target=mine.py:MeanLoss"): "got a tensor of shape []",
}


@pytest.mark.parametrize("overrides", BAD, ids=" ".join)
def test_bad_input_is_one_clear_line(folder, overrides):
    run = harness(folder, *overrides, code=2)
    assert BAD[overrides] in run.stderr
    assert "Traceback" not in run.stderr
    assert not trials(folder)
