"""The examples, by the very commands that they tell; shorter trainings."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SHORT = ("steps=4", "algebra_steps=4", "permutations=30", "tracking=disabled", "workers=2")


def commands(text):
    """What a text tells to type after `accumulation-harness run`."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = [
        line.partition("#")[0].split() for line in joined.splitlines() if line.strip().startswith("accumulation-harness run")
    ]
    return [line[2:] for line in lines]


def python(folder, *words):
    """What Python prints in a folder."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/harness", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(folder, *arguments):
    """The arms of each trial that is stored after a command in a folder."""
    python(folder, "-m", "accumulation_harness", "run", *arguments)
    return {path.parent.name: json.loads(path.read_text())["arms"] for path in sorted(folder.glob("results/*/*/trial.json"))}


def causes(trials, arm="accumulated"):
    """Of each trial the causes of all its arms of that name; nothing for arms that are equivalent."""
    found = {}
    for trial, arms in trials.items():
        own = [one for one in arms if one["arm"] == arm]
        assert all((one["verdict"] == "equivalent") == (one["cause"] == "") for one in own), own
        found[trial.rpartition("-seed")[0]] = {one["cause"] for one in own}
    return found


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    return tmp_path


@pytest.mark.slow
def test_images_with_batch_norm_and_lion(folder):
    [command] = commands((EXAMPLES / "images.py").read_text())
    assert causes(run(folder, *command, *SHORT)) == {
        "Digits-as_is-Lion-float32": {"batch_statistics"},
        "Digits-group-Lion-float32": {""},
    }


@pytest.mark.slow
def test_a_language_model_with_token_counts(folder):
    pytest.importorskip("transformers")
    [command] = commands((EXAMPLES / "language_model.py").read_text())
    trials = run(folder, *command, *SHORT, "faults=[mean_of_means]", "+workload.args.samples=300")
    assert causes(trials) == {"Lines-as_is-adamw-float32": {""}}
    assert causes(trials, "mean_of_means") == {"Lines-as_is-adamw-float32": {"mean_of_means"}}


@pytest.mark.slow
def test_a_loss_that_couples_rows(folder):
    coupled, apart = commands((EXAMPLES / "coupled_loss.py").read_text())
    size = ("effective_batch=48", "accumulation_steps=[4]")
    assert causes(run(folder, *coupled, *SHORT, *size[1:])) == {"Embeddings-as_is-sgd-float32": {"non_separable_loss"}}
    shutil.rmtree(folder / "results")
    assert causes(run(folder, *apart, *SHORT, *size)) == {"Embeddings-as_is-sgd-float32": {""}}


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
    python(mine, "-m", "accumulation_harness", "report", "--results", "results", "--out", "reports")
    cells = [cell for cell in json.loads((mine / "look.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells) + "\nprint(own['cause'].unique())"
    assert "batch_statistics" in python(mine, "-c", code)


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
