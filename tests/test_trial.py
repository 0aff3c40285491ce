"""Whole trials on real data: what must be equivalent is, what must differ does, and measuring changes nothing."""

import json

import pytest
import torch

from accumulation_harness.config import ConfigError
from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.measure.trial import accumulated, full_batch, permuted, run_trial
from accumulation_harness.recipes.determinism import deterministic
from accumulation_harness.recipes.micro_batch import hash_seed
from accumulation_harness.recipes.recipe import take_step
from accumulation_harness.results.measurements import Measurements
from tests.slow import slow
from tests.trials import arms, by_name, setting_of, trial

ADAM = "optimizer.name=adam optimizer.lr=3e-3"
MLP = "workload.model=mlp workload.width=2"


def short(*settings):
    """9 steps of 196: an epoch of 1,500 ends in a short window of 128."""
    own = "workload.width=3 effective_batch=196 accumulation_steps=[7] steps=9 algebra_steps=9 probe_every=5"
    return trial(own, *settings)


@pytest.mark.parametrize(
    "changes",
    [
        "norm=layer optimizer.name=momentum optimizer.lr=0.05 precision=float16",
        "norm=group precision=bfloat16",
        slow(f"precision=float64 {ADAM}"),
        slow("norm=group split=ragged accumulation_steps=[2,5,16]"),
        "workload.data=text workload.model=transformer workload.width=4 workload.depth=1 norm=layer split=ragged "
        "accumulation_steps=[3] steps=5 algebra_steps=5",
        f"clip_norm=0.1 {ADAM} optimizer.weight_decay=0.1",
    ],
)
def test_correct_accumulation_is_equivalent(changes):
    for name, row in by_name(short(changes)).items():
        assert (row["verdict"], row["cause"]) == ("equivalent", "") and row["reasons"].startswith("compared: "), name
        assert row["algebra_error"] <= 1e-12 and row["counters_ok"]


def test_a_window_without_any_loss_term_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"effective_batch=2: expected windows with a loss term each: window \d+ has none"):
        arms(short(MLP, "workload.data=ignored_labels effective_batch=2 accumulation_steps=[2]"))


def test_training_that_explodes_is_inconclusive():
    row = by_name(short("optimizer.lr=6e4 workload.penalty=10"))["accumulated-7"]
    assert row["verdict"] == "inconclusive" and "non-finite" in row["reasons"]


@pytest.mark.parametrize(
    "settings",
    [
        "workload.dropout=0.2 precision=float16",
        slow("precision=float16"),
        slow("precision=float32"),
    ],
)
def test_measuring_changes_no_bit(settings):
    """A probed trial and bare loops over the same arms see the same losses, step by step, and the same generator afterwards."""
    config = short("norm=batch", settings, ADAM, "algebra_steps=3 probe_every=1 referee_every=2")
    measured = {"full-1": [], "accumulated-7": [], "permuted-1": []}

    def keep(step, rows):
        for row in rows:
            if row["arm"] in ("full", "accumulated", "permuted"):
                measured[str(ArmName(row["arm"], row["accumulation_steps"]))].append(row["loss"])

    torch.manual_seed(5)
    before = torch.get_rng_state()
    run_trial(config, keep)
    assert torch.equal(torch.get_rng_state(), before), "a trial leaves the caller's generator alone"

    setting = setting_of(config)
    recipes = {
        "full-1": full_batch(config),
        "accumulated-7": accumulated(config, 7),
        "permuted-1": permuted(config, 0),
    }
    stream = list(setting.windows())
    for name, recipe in recipes.items():
        arm, bare = setting.arm(recipe), []
        with deterministic(config.precision):  # the same kernels
            for t, ids in enumerate(stream):
                torch.manual_seed(hash_seed(config.seed, t))
                bare.append(float(take_step(arm, arm.workload.batch(ids))))
        assert bare == measured[name], name
    assert measured["full-1"] != measured["accumulated-7"]


def test_trials_of_one_store_share_what_they_measure_alike(tmp_path, monkeypatch):
    """Verdict rows are the same to the bit, also where training goes first, because another trial measures at this moment."""
    own = {"float32": "precision=float32", "float16": "precision=float16", "adam": ADAM}
    trials = {name: short(MLP, "steps=3 algebra_steps=3 norm=batch", settings) for name, settings in own.items()}

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
    ("settings", "field"),
    [
        ("workload.model=mlp norm=batch accumulation_steps=[196]", "accumulation_steps"),
        ("effective_batch=1501 accumulation_steps=[1501]", "effective_batch"),
        ("accumulation_steps=[5]", "accumulation_steps"),
    ],
)
def test_what_cannot_run_names_its_field(settings, field):
    with pytest.raises(ConfigError) as raised:
        arms(short(settings))
    assert raised.value.field == field


def test_dead_units_of_a_small_micro_batch_are_no_underflow():
    """Four samples under BatchNorm leave other channels dead than 64 do: zeros that exact arithmetic has too."""
    [row, _] = arms(trial("norm=batch precision=float16 accumulation_steps=[16] steps=1 algebra_steps=1 seed=2"))
    assert (row["cause"], row["explained"]) == ("batch_statistics", True)
