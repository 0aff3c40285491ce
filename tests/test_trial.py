"""Whole trials on real data: what must be equivalent is, what must differ does, and measuring changes nothing."""

import dataclasses
import json

import pytest
import torch

from accumulation_harness.config import (
    ConfigError,
    Data,
    Model,
    Norm,
    OptimizerConfig,
    OptimizerName,
    Precision,
    Split,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.trial import (
    full_batch,
    permuted,
    run_trial,
    standard_candidates,
)
from accumulation_harness.recipes.determinism import deterministic
from accumulation_harness.recipes.micro_batch import hash_seed
from accumulation_harness.recipes.recipe import take_step
from accumulation_harness.results.measurements import Measurements

ADAM = OptimizerConfig(name=OptimizerName.adam, lr=3e-3)
MOMENTUM = OptimizerConfig(name=OptimizerName.momentum, lr=0.05)
# 9 steps of 196: an epoch of 1,500 ends in a short window of 128.
SHORT = TrialConfig(
    workload=WorkloadConfig(width=3), effective_batch=196, accumulation_steps=(7,), steps=9, algebra_steps=9, probe_every=5
)  # fmt: skip
TEXT = WorkloadConfig(data=Data.text, model=Model.transformer, width=4, depth=1)


def run(config, candidates=None):
    """Verdict rows by the arm's name in its text form."""
    result = run_trial(config, lambda step, rows: None, candidates)
    return {str(ArmName(row["arm"], row["accumulation_steps"])): row for row in result.arms}


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": Norm.layer, "optimizer": MOMENTUM, "precision": Precision.float16},
        {"norm": Norm.group, "precision": Precision.bfloat16},
        pytest.param({"precision": Precision.float64, "optimizer": ADAM}, marks=pytest.mark.slow),
        pytest.param({"norm": Norm.group, "split": Split.ragged, "accumulation_steps": (2, 5, 16)}, marks=pytest.mark.slow),
        {"workload": TEXT, "norm": Norm.layer, "split": Split.ragged, "accumulation_steps": (3,), "steps": 5, "algebra_steps": 5},
        {"clip_norm": 0.1, "optimizer": dataclasses.replace(ADAM, weight_decay=0.1)},
    ],
    ids=str,
)
def test_correct_accumulation_is_equivalent(changes):
    for name, row in run(dataclasses.replace(SHORT, **changes)).items():
        assert (row["verdict"], row["cause"]) == ("equivalent", "") and row["reasons"].startswith("compared: "), name
        assert row["algebra_error"] <= 1e-12 and row["counters_ok"]


IGNORING = dataclasses.replace(
    SHORT,
    workload=WorkloadConfig(data=Data.ignored_labels, model=Model.mlp, width=2),
    effective_batch=12,
    accumulation_steps=(12,),
)


def test_a_window_without_any_loss_term_is_refused_by_name():
    config = dataclasses.replace(IGNORING, effective_batch=2, accumulation_steps=(2,))
    with pytest.raises(ConfigError, match=r"effective_batch=2: expected windows with a loss term each: window \d+ has none"):
        run(config)


def test_training_that_explodes_is_inconclusive():
    exploding = dataclasses.replace(SHORT, optimizer=OptimizerConfig(lr=6e4), workload=WorkloadConfig(penalty=10.0))
    row = run(exploding)["accumulated-7"]
    assert row["verdict"] == "inconclusive" and "non-finite" in row["reasons"]


@pytest.mark.parametrize(
    ("workload", "precision"),
    [
        (WorkloadConfig(width=3, dropout=0.2), Precision.float16),
        pytest.param(WorkloadConfig(width=3), Precision.float16, marks=pytest.mark.slow),
        pytest.param(WorkloadConfig(width=3), Precision.float32, marks=pytest.mark.slow),
    ],
    ids=["dropout-float16", "float16", "float32"],
)
def test_measuring_changes_no_bit(workload, precision):
    """A probed trial and bare loops over the same arms see the same losses, step by step, and the same generator afterwards."""
    config = dataclasses.replace(
        SHORT,
        norm=Norm.batch,
        workload=workload,
        precision=precision,
        optimizer=ADAM,
        algebra_steps=3,
        probe_every=1,
        referee_every=2,
    )
    measured: dict[str, list[float]] = {"full-1": [], "accumulated-7": [], "permuted-1": []}

    def keep(step, rows):
        for row in rows:
            if row["arm"] in ("full", "accumulated", "permuted"):
                measured[str(ArmName(row["arm"], row["accumulation_steps"]))].append(row["loss"])

    torch.manual_seed(5)
    before = torch.get_rng_state()
    run_trial(config, keep)
    assert torch.equal(torch.get_rng_state(), before), "a trial leaves the caller's generator alone"

    setting = Setting(config, torch.device("cpu"))
    recipes = {
        "full-1": full_batch(config),
        "accumulated-7": standard_candidates(config)[0].recipe,
        "permuted-1": permuted(config, 0),
    }
    stream = list(setting.windows())
    for name, recipe in recipes.items():
        arm, bare = setting.arm(recipe), []
        with deterministic(precision):  # the same kernels
            for t, ids in enumerate(stream):
                torch.manual_seed(hash_seed(config.seed, t))
                bare.append(float(take_step(arm, arm.workload.batch(ids))))
        assert bare == measured[name], name
    assert measured["full-1"] != measured["accumulated-7"]


def test_trials_of_one_store_share_what_they_measure_alike(tmp_path, monkeypatch):
    """Verdict rows are the same to the bit, also where training goes first, because another trial measures at this moment."""
    tiny = WorkloadConfig(model=Model.mlp, width=2)
    float32 = dataclasses.replace(SHORT, workload=tiny, steps=3, algebra_steps=3, norm=Norm.batch)
    trials = {
        "float32": float32,
        "float16": dataclasses.replace(float32, precision=Precision.float16),
        "adam": dataclasses.replace(float32, optimizer=ADAM),
    }

    def rows(config, shared):
        return json.dumps(run_trial(config, lambda step, rows: None, None, shared).arms)  # as it is stored

    alone = {name: rows(config, None) for name, config in trials.items()}
    used = {}
    for name, config in trials.items():
        shared = Measurements(tmp_path, name)
        if name == "adam":
            monkeypatch.setattr(Measurements, "is_being_made", lambda self, measurement: True)
        assert rows(config, shared) == alone[name] != alone["float16" if name == "float32" else "float32"]
        used[name] = {identity.partition("-")[0]: by for identity, by in shared.used.items()}
    assert used == {
        "float32": {"algebra": "float32", "rounding": "float32", "poison": "float32"},
        "float16": {"algebra": "float32", "rounding": "float16", "poison": "float16"},
        "adam": {"algebra": "adam", "rounding": "float32", "poison": "adam"},
    }


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"workload": WorkloadConfig(model=Model.mlp), "norm": Norm.batch, "accumulation_steps": (196,)}, "accumulation_steps"),
        ({"effective_batch": 1501, "accumulation_steps": (1501,)}, "effective_batch"),
        ({"accumulation_steps": (5,)}, "accumulation_steps"),
    ],
    ids=str,
)
def test_what_cannot_run_names_its_field(changes, field):
    with pytest.raises(ConfigError) as raised:
        run(dataclasses.replace(SHORT, **changes))
    assert raised.value.field == field


def test_dead_units_of_a_small_micro_batch_are_no_underflow():
    """Four samples under BatchNorm leave other channels dead than 64 do: zeros that exact arithmetic has too."""
    config = TrialConfig(norm=Norm.batch, precision=Precision.float16, accumulation_steps=(16,), steps=1, algebra_steps=1, seed=2)
    row = run(config)["accumulated-16"]
    assert (row["cause"], row["explained"]) == ("batch_statistics", True)
