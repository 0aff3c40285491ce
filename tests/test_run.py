"""Real Hydra command lines; `run_many` is replaced where only the composition matters."""

import dataclasses
import os
import sys

import pytest

from accumulation_harness.analysis.question import registered
from accumulation_harness.config import (
    HarnessConfig,
    OptimizerConfig,
    OptimizerName,
    Precision,
    compose,
)
from accumulation_harness.config.identity import identity
from accumulation_harness.config.questions import grids
from accumulation_harness.results.store import Store
from accumulation_harness.sweep import experiment, run
from accumulation_harness.sweep.child import Failure
from accumulation_harness.system import terminal
from tests.commands import harness, python
from tests.slow import one_in


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs a command line in this process and returns its exit code and the configurations that would be run."""
    configs = []

    def remember(given):
        configs.extend(given)
        return experiment.Outcome(done=len(given), skipped=0)

    def run_command(*arguments):
        configs.clear()
        monkeypatch.setattr(sys, "argv", ["harness", *arguments])
        return run.main(), list(configs)

    monkeypatch.setattr(experiment, "run_many", remember)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.chdir(tmp_path)
    return run_command


def test_the_command_alone_runs_the_defaults_of_the_dataclasses(command, tmp_path):
    assert command() == (0, [HarnessConfig()])
    assert os.listdir(tmp_path) == [], "Hydra made folders"


@pytest.mark.parametrize("name", ["digits", "digits_mlp", "digits_resnet18", "text"])
def test_the_name_of_a_workload_is_its_label(name):
    assert compose.compose_trial([f"workload={name}"]).workload.label == name


def test_values_keep_their_types(command):
    _, (config,) = command("accumulation_steps=[4,2]", "clip_norm=1", "precision=float16", "optimizer.lr=1e-2", "results=out")
    expected = dataclasses.replace(
        HarnessConfig(), accumulation_steps=(4, 2), clip_norm=1.0, precision=Precision.float16, results="out",
        optimizer=OptimizerConfig(lr=0.01),
    )  # fmt: skip
    assert config == expected
    assert type(config.clip_norm) is float and type(config.precision) is Precision
    hash(config)


# Command line: how the one line on stderr begins.
BAD_INPUT = {
    "precision=fp16": "precision=fp16: expected one of float64, float32, float16, bfloat16; did you mean float16?",
    "norm=groupnorm": "norm=groupnorm: expected one of as_is, none, batch, group, layer; did you mean group?",
    "precision=fp32,fp16": "precision=fp32,fp16: expected one value; add -m to sweep over several\n",
    "optimzer=adam": "optimzer: expected a known setting; did you mean optimizer?",
    "+optimizer.momentm=0.9": "optimizer.momentm=0.9: expected a known setting; did you mean optimizer.momentum?",
    "optimizer.lr=nan": "optimizer.lr=nan: expected a number from 1e-16 to 65504 (below it",
    "-m accumulation_steps=2,4": (
        "accumulation_steps=2: expected a list, each an integer from 1 to 60000; write accumulation_steps=[2] ("
    ),
    "accumulation_steps=[2,4": "accumulation_steps=[2,4: expected key=value",
    "data.root=a=b": "data.root=a=b: expected a text with such signs in quotes, \"data.root='a=b'\"",
    "accumulation_steps=[2,3]": "accumulation_steps=3: expected a divisor of effective_batch=64, or split=ragged",
    "workload=text norm=batch": "norm=batch: expected layer or none with workload.data=text",
    "norm=${steps}": "norm: expected one of as_is, none, batch, group, layer (While dereferencing interpolation '${steps}'",
    "seed": "seed: expected key=value",
    "experiment=equivalence": "experiment: expected +experiment=NAME",
    "-m +experiment=equivalence,equivalence": "+experiment=equivalence,equivalence: expected one experiment",
    "-m optimizer.lr=interval(1,2)": "optimizer.lr=interval(1,2): expected a list of values or a range to sweep over",
    "-m workload=digits,text norm=batch": "norm=batch: expected layer or none with workload.data=text (trial 2 of 2: ",
    "+experiment=equivalence workload=text norm=batch": "+experiment=equivalence workload=text norm=batch: expected ",
    "+experiment=accounting hydra.sweeper.size=small": "hydra.sweeper.size=small: expected one of full, quick",
    "-sc query=bash": "-sc query=bash: expected COMP_LINE",
    "-m seed=range(1000000000000000)": "seed=range(1000000000000000): expected at most 20000 values to sweep over",
    "study=loss_scaling": "precision=float32: expected float16: the others have no loss scale, with study=loss_scaling",
    "norm=as_is": "norm=as_is: expected none, batch, group or layer with workload.data=digits",
    "workload.target=mine.py:Images": "workload.target=mine.py:Images: expected nothing without workload=custom",
    "workload=custom workload.target=mine.py:Mine workload.width=4": "workload.width=4: expected nothing with workload=custom",
    "workload=custom workload.target=mine.py:Mine +workload.args.width=nan": "workload.args.width=nan: expected text",
    "-m --cfg job": "-m --cfg job: ",
}


@pytest.mark.parametrize("arguments", one_in(3, BAD_INPUT))
def test_bad_input_is_one_clear_line(command, capfd, arguments):
    assert command(*arguments.split()) == (2, [])
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.startswith(BAD_INPUT[arguments]) and errors.count("\n") == 1, errors


def test_a_traceback_on_request(command, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="workers"):
        command("workers=-1")


def test_a_bug_is_no_bad_input(command, monkeypatch):
    def broken(_):
        raise ValueError("a bug")

    monkeypatch.setattr(experiment, "run_many", broken)
    with pytest.raises(ValueError, match="a bug"):
        command()


def test_a_sweep_takes_lists_and_ranges(command):
    _, configs = command("-m", "seed=range(3)", "norm=none,group", "accumulation_steps=[2],[2,4]")
    assert len(configs) == len({identity(config.trial) for config in configs}) == 12


EQUIVALENCE = {
    "": 78,
    "seed=0 optimizer=adam": 10,
    "workload=text": 12,
    "norm=batch": 18 + 5,
    "optimizer=adam,adamw seed=0": 12 + 4 + 4 + 4,
    "steps=10,20": 2 * 78,
    "hydra.sweeper.size=quick": 50,  # two seeds
}


@pytest.mark.parametrize("arguments", one_in(5, EQUIVALENCE))
def test_the_command_line_restricts_or_replaces_axes_of_a_named_grid(command, arguments):
    code, configs = command("+experiment=equivalence", *arguments.split())
    assert (code, len(configs)) == (0, EQUIVALENCE[arguments])
    assert len({identity(config.trial) for config in configs}) == len(configs)


@pytest.mark.slow
def test_all_experiments_at_once(command):
    names = {*grids()}
    assert names == set(registered()) - {"released_trainers"}, "the one that is made of audits"
    core = {config.experiment for config in command("+experiment=core", "hydra.sweeper.size=quick", "seed=0")[1]}
    assert len(core) > 1 and core < names
    _, together = command("+experiment=all", "hydra.sweeper.size=quick", "seed=0")
    one_by_one = [command(f"+experiment={name}", "hydra.sweeper.size=quick", "seed=0")[1] for name in sorted(names)]
    assert {config.experiment for config in together} == names
    assert set(together) == {config for configs in one_by_one for config in configs}


def test_the_quick_grid_is_a_part_of_the_full_one(command):
    _, full = command("+experiment=accounting")
    _, quick = command("+experiment=accounting", "hydra.sweeper.size=quick")
    assert set(quick) < set(full) and len(quick) == 4
    _, restricted = command("+experiment=accounting", "hydra.sweeper.size=quick", "optimizer=adam")
    assert set(restricted) == {config for config in quick if config.optimizer.name == OptimizerName.adam}


def test_fast_composition_is_hydras_composition(command, monkeypatch):
    arguments = ["-m", "optimizer=adam,nesterov", "optimizer.lr=0.5,0.25", "norm=none,layer", "accumulation_steps=[2,4],[8]",
                 "data.root=null", "++clip_norm=1.0"]  # fmt: skip
    _, fast = command(*arguments)
    monkeypatch.setattr(compose.Composer, "_is_value", lambda _self, _override: False)
    _, slow = command(*arguments)
    assert len(fast) == 16 and fast == slow


def test_every_launcher_of_hydra_can_be_used(command):
    code, configs = command("-m", "hydra/launcher=basic", "seed=0,1")
    assert (code, [config.seed for config in configs]) == (0, [0, 1])


def test_the_exit_code_tells_failures(command, monkeypatch):
    failed = Failure(trial="t", summary="s", details="")
    refuted = dataclasses.replace(failed, is_bad_input=True)
    for failures, code in [((failed,), 1), ((failed, refuted), 1), ((refuted,), 2)]:
        outcome = experiment.Outcome(done=1, skipped=0, failures=failures)
        monkeypatch.setattr(experiment, "run_many", lambda _, outcome=outcome: outcome)
        assert command()[0] == command("-m", "seed=0,1")[0] == code


def test_help_loads_nothing_heavy():
    program = "import sys; sys.argv = ['harness', '--help']\nfrom accumulation_harness.sweep.run import main\n" + (
        "main(), print({'torch', 'wandb', 'pandas', 'pyarrow', 'numpy'} & sys.modules.keys())"
    )
    done = python("-c", program)
    assert done.stdout.endswith("set()\n") and "+experiment=NAME" in done.stdout


@pytest.mark.slow
def test_submitit_runs_a_job_per_trial(tmp_path):
    """On a cluster's launcher, here its local executor: a job of its own for each trial; one that fails stops no other."""
    pytest.importorskip("submitit")
    tiny = ["workload=digits_mlp", "steps=2", "algebra_steps=2", "accumulation_steps=[2]", "tracking=disabled"]
    cells = ["-m", "effective_batch=2000,16", "hydra/launcher=submitit_local", f"hydra.sweep.dir={tmp_path}/jobs"]
    done = harness("run", *cells, *tiny, f"results={tmp_path}/results", cwd=tmp_path, code=terminal.BAD_INPUT)
    assert "effective_batch=2000: expected at most the 1500 training samples" in done.stderr
    finished = [trial.config["effective_batch"] for trial in Store(tmp_path / "results").trials()]
    assert finished == [16]
    assert list((tmp_path / "jobs").rglob("*_log.out"))
    assert "2 trials handed to the launcher; meanwhile: " in done.stdout and "1 trial done, 1 failed." in done.stdout
