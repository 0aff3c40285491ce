"""Tasks of the user's own from the command line, in a folder that is none of ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accumulation_harness.config import ConfigError, targets
from accumulation_harness.config.targets import data_fingerprint, digest_of
from accumulation_harness.results.store import Store
from accumulation_harness.sweep import status, verify
from tests.own import tasks

ROOT = Path(__file__).parents[2]
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


def harness(folder, *overrides, **environment):
    code = "import sys; sys.path[0] = sys.argv.pop(1); from accumulation_harness.sweep.run import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(ROOT), *overrides, *QUICK]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment
    )


def trials(folder):
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("results/*/*/trial.json")}


def test_a_sweep_over_a_task_its_arguments_and_its_normalisation(folder):
    sweep = ("-m", "workload=custom", "workload.target=mine.py:Images", "+workload.args.width=4,5", "norm=group")
    run = harness(folder, *sweep)
    assert run.returncode == 0, run.stderr
    arms = [trial["arms"][0] for trial in trials(folder).values()]
    assert {arm["workload"] for arm in arms} == {"Images(width=4)", "Images(width=5)"} and not any(arm["cause"] for arm in arms)
    assert all(name.startswith("Images-group-sgd-float32-seed") for name in trials(folder)) and "Images(width=4)" in run.stdout
    again = harness(folder, *sweep)
    assert "Nothing to do: 2 trials finished already." in again.stdout


def test_a_trial_counts_while_what_it_has_read_is_what_it_was(folder):
    """Also through a relative import inside a package; the trials of the changed code measure everything anew."""
    (folder / "lab" / "rate.py").write_text("RATE = 1.0\n")
    (folder / "lab" / "scaled.py").write_text(
        "from .rate import RATE\nfrom .vision import Images\n\n\nclass Scaled(Images):\n"
        "    def losses(self, outputs, batch):\n        return RATE * super().losses(outputs, batch)\n"
    )
    one = ("workload=custom", "workload.target=lab.scaled:Scaled")
    assert harness(folder, *one).returncode == 0
    assert "Nothing to do" in harness(folder, *one).stdout
    (folder / "lab" / "rate.py").write_text("RATE = 3.0\n")
    [stale] = Store(folder / "results").status()
    assert (stale.state, stale.detail) == ("stale", "lab/rate.py has changed")
    other = harness(folder, "-m", *one, "schedule.warmup_steps=0,1")
    assert other.returncode == 0 and f"run again: {stale.trial}: lab/rate.py has changed" in other.stderr
    assert {path.parent.name for path in folder.glob("results/*/*.stale-1/trial.json")} == {f"{stale.trial}.stale-1"}
    for one in Store(folder / "results").trials():
        made = {json.loads((folder / "results" / by / "trial.json").read_text())["files"]["lab/rate.py"]
                for by in one.record["measured_by"].values()}  # fmt: skip
        assert made == {one.record["files"]["lab/rate.py"]}, "a measurement of other code"


NEEDS = """
import importlib, json, os
from importlib.resources import files
from pathlib import Path
import yaml
from .rate import RATE
from .vision import Images
ROWS = json.loads(Path("data/rows.json").read_text())
CONFIG = yaml.safe_load(open("settings.yaml"))
TABLE = files("lab").joinpath("table.csv").read_text()
WEIGHTS = Path("weights.txt").read_bytes()
LINKED = Path("current.txt").read_text()
CHOSEN = importlib.import_module(os.environ["CHOSEN"]).A
NAMES = sorted(path.name for path in Path("texts").iterdir())
SHARED = Path(os.environ["ELSEWHERE"], "shared.txt").read_text()

class Needing(Images):
    pass
"""
CHANGES = {  # kind of a dependency -> the file, what becomes of it, how that is said
    "module": ("lab/rate.py", "RATE = 3.0", "lab/rate.py has changed"),
    "data": ("data/rows.json", "[2]", "data/rows.json has changed"),
    "configuration": ("settings.yaml", "a: 2", "settings.yaml has changed"),
    "data of a package": ("lab/table.csv", "1,3", "lab/table.csv has changed"),
    "deleted file": ("weights.txt", None, "weights.txt is gone"),
    "what a link leads to": ("v1.txt", "changed", "current.txt has changed"),
    "another link": ("current.txt", Path("v2.txt"), "current.txt has changed"),
    "module that a variable names": ("chosen.py", "A = 2", "chosen.py has changed"),
    "folder that is listed": ("texts/more.txt", "", "texts has changed"),
    "outside of the folder": ("../elsewhere/shared.txt", "2", "elsewhere/shared.txt has changed"),
}


@pytest.mark.slow
def test_every_kind_of_dependency_that_changes_is_told_and_the_former_one_counts_again(folder, capsys, monkeypatch):
    texts = {"lab/needing.py": NEEDS, "lab/rate.py": "RATE = 1.0", "data/rows.json": "[1]", "settings.yaml": "a: 1",
             "lab/table.csv": "1,2", "weights.txt": "1", "v1.txt": "one", "v2.txt": "two", "chosen.py": "A = 1",
             "texts/a.txt": "", "../elsewhere/shared.txt": "1"}  # fmt: skip
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "current.txt").symlink_to("v1.txt")
    for name, value in {"CHOSEN": "chosen", "ELSEWHERE": str(folder.parent / "elsewhere")}.items():
        monkeypatch.setenv(name, value)
    run = harness(folder, "workload=custom", "workload.target=lab.needing:Needing")
    assert run.returncode == 0, run.stderr
    store = ["--results", str(folder / "results")]
    for kind, (name, new, said) in CHANGES.items():
        path, was = folder / name, (folder / name).read_bytes() if (folder / name).exists() else None
        link = os.readlink(path) if path.is_symlink() else None
        path.unlink(missing_ok=True)
        if isinstance(new, Path):
            path.symlink_to(new)
        elif new is not None:
            path.write_text(new)
        assert (status.main(store), verify.main(store)) == (0, 1), kind
        out = capsys.readouterr().out
        assert out.count(said) == 2 and out.count("stale: ") == 2, (kind, out)
        path.unlink(missing_ok=True)
        if link is not None:
            path.symlink_to(link)
        elif was is not None:
            path.write_bytes(was)
        assert (status.main(store), verify.main(store)) == (0, 0), kind
        capsys.readouterr()
    monkeypatch.setenv("CHOSEN", "another")
    assert status.main(store) == 0 and "$CHOSEN has changed" in capsys.readouterr().out


@pytest.mark.slow
def test_changed_data_are_another_trial_where_the_task_tells_of_them(folder):
    """Of data that are no file."""
    (folder / "told.py").write_text(
        "import os\nfrom lab.vision import Images\n\n\nclass Told(Images):\n"
        "    def __init__(self):\n        super().__init__(seed=int(os.environ['DATA']))\n\n"
        "    def fingerprint(self):\n        return int(os.environ['DATA'])\n"
    )
    one = ("workload=custom", "workload.target=told.py:Told")
    assert harness(folder, *one, DATA="0").returncode == 0
    assert "Nothing to do" in harness(folder, *one, DATA="0").stdout
    assert harness(folder, *one, DATA="1").returncode == 0
    assert len({trial["config"]["workload"]["source"] for trial in trials(folder).values()}) == 2
    assert "fingerprint() that gives a text; ValueError: invalid literal" in harness(folder, *one, DATA="two").stderr


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
        with pytest.raises(ConfigError, match=r"fingerprint\(\) that gives a text; it said nothing"):
            data_fingerprint("workload.target", f"{file}:Told", "{}")


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
    run = harness(folder, "--config-dir", str(conf), "+experiment=first")
    assert run.returncode == 0, run.stderr
    stored = [json.loads(path.read_text())["config"] for path in folder.glob("results/first/*/trial.json")]
    assert len(stored) == 2
    assert all(one["workload"]["args"] == {"width": 3} for one in stored), stored


BAD = {
    ("workload=custom", "workload.target=other.py:Images"): "there is no file other.py",
    ("workload=custom", "workload.target=mine.py:MeanLoss"): "got a tensor of shape []",
}


@pytest.mark.parametrize("overrides", BAD, ids=" ".join)
def test_bad_input_is_one_clear_line(folder, overrides):
    run = harness(folder, *overrides)
    assert run.returncode == 2
    assert BAD[overrides] in run.stderr
    assert "Traceback" not in run.stderr
    assert not trials(folder)
