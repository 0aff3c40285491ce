"""The examples, by the very commands that they tell; shorter trainings."""

import json
import re
import shutil

import pytest

from tests.commands import ROOT, harness, python

EXAMPLES = ROOT / "examples"
SHORT = ("steps=4", "algebra_steps=4", "permutations=30", "tracking=disabled", "workers=2")


def commands(text):
    """What a text tells to type after `accumulation-harness run`."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = [
        line.partition("#")[0].split() for line in joined.splitlines() if line.strip().startswith("accumulation-harness run")
    ]
    return [line[2:] for line in lines]


def run(folder, *arguments):
    """The arms of each trial that is stored after a command in a folder."""
    harness("run", *arguments, cwd=folder)
    return {path.parent.name: json.loads(path.read_text())["arms"] for path in sorted(folder.glob("results/*/*/trial.json"))}


def causes(trials):
    """Of each trial the causes of its accumulated and faulty arms, nothing for those that are equivalent."""
    found = {}
    for trial, arms in trials.items():
        own = [one for one in arms if one["arm"] != "permuted"]
        assert all((one["verdict"] == "equivalent") == (one["cause"] == "") for one in own), own
        found[trial.rpartition("-seed")[0]] = {one["cause"] for one in own}
    return found


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place", "settings", "expected"),
    [
        ("images", 0, "", {"Digits-as_is-Lion-float32": {"batch_statistics"}, "Digits-group-Lion-float32": {""}}),
        (
            "language_model",
            0,
            "faults=[mean_of_means] +workload.args.samples=300",
            {"Lines-as_is-adamw-float32": {"", "mean_of_means"}},
        ),
        ("coupled_loss", 0, "accumulation_steps=[4]", {"Embeddings-as_is-sgd-float32": {"non_separable_loss"}}),
        ("coupled_loss", 1, "effective_batch=48 accumulation_steps=[4]", {"Embeddings-as_is-sgd-float32": {""}}),
    ],
)
def test_what_an_example_tells_to_type(folder, name, place, settings, expected):
    if name == "language_model":
        pytest.importorskip("transformers")
    command = commands((EXAMPLES / f"{name}.py").read_text())[place]
    assert causes(run(folder, *command, *SHORT, *settings.split())) == expected


@pytest.mark.slow
def test_the_sweep_to_copy(folder):
    """One trial, the sweep, the page and the notebook, in the student's folder."""
    mine = folder / "examples" / "my_sweep"
    one, sweep, slurm = commands((mine / "README.md").read_text())
    assert causes(run(mine, *one, *SHORT)) == {"MyTask-as_is-sgd-float32": {"batch_statistics"}}
    trials = run(mine, *sweep, *SHORT, "seed=0", "precision=float32")
    assert len(trials) == 1 + 4
    assert {name: own for name, own in causes(trials).items() if "group" in name} == {
        "MyTask-group-adam-float32": {""},
        "MyTask-group-momentum-float32": {""},
    }
    assert "hydra/launcher=submitit_slurm" in slurm and "hydra.launcher.gres=gpu:1" in slurm
    harness("report", "--results", "results", "--out", "reports", cwd=mine)
    cells = [cell for cell in json.loads((mine / "look.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells) + "\nprint(own['cause'].unique())"
    assert "batch_statistics" in python("-c", code, cwd=mine).stdout


@pytest.mark.slow
def test_the_sweep_to_copy_as_jobs(folder):
    """The recipe for Slurm, its launcher exchanged for submitit's local executor: a job for each trial of the task."""
    pytest.importorskip("submitit")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    mine = folder / "examples" / "my_sweep"
    command = commands((mine / "README.md").read_text())[2]
    local = [one.replace("submitit_slurm", "submitit_local") for one in command if "partition" not in one and "gres" not in one]
    trials = run(mine, *local, *SHORT, "seed=0", "precision=float32", "norm=as_is,group", "optimizer=adam")
    assert causes(trials) == {"MyTask-as_is-adam-float32": {"batch_statistics"}, "MyTask-group-adam-float32": {""}}
    assert len(list((mine / "jobs").rglob("*_log.out"))) == 2
