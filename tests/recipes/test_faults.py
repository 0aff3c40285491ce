"""The planted faults: their settings, in which the golden table says what each is called, and what is asked of them besides."""

from typing import Any

import pytest

from accumulation_harness.config import (
    Data,
    DataConfig,
    LastWindow,
    Model,
    Norm,
    OptimizerConfig,
    OptimizerName,
    Precision,
    ScheduleConfig,
    ScheduleName,
    Split,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.experiments.replicas import replicas
from accumulation_harness.judge.cause import INHERENT, ON_RANKS, Cause
from accumulation_harness.measure.ranks import SCALED, UNSYNCHRONISED
from accumulation_harness.measure.trial import Candidate, run_trial, split_plan, standard_candidates, with_faults
from accumulation_harness.recipes.catalogue import FAULTS
from accumulation_harness.recipes.recipe import Recipe

ADAMW = OptimizerConfig(name=OptimizerName.adamw, lr=3e-3, weight_decay=0.1)
MOMENTUM = OptimizerConfig(name=OptimizerName.momentum, lr=0.05)
TEXT = WorkloadConfig(data=Data.text, model=Model.transformer, depth=1)
PAIRS = WorkloadConfig(data=Data.pairs, model=Model.mlp, width=2)

# Two faults whose marks are apart are both named; of two that change the same gradient nothing is said.
BOTH_NAMED = {
    ("F1", "F9"): True, ("F3", "F29"): True, ("F2", "F30"): True, ("F6", "F2"): False, ("F1", "F31"): False, ("F18", "F1"): False,
}  # fmt: skip
PLANTED = {fault.id: fault.apply for fault in FAULTS}
FLOAT16 = {"precision": Precision.float16, "clip_norm": 0.5, "split": Split.ragged}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw with moving average and a penalty": {
        "optimizer": ADAMW,
        "ema_decay": 0.9,
        "workload": WorkloadConfig(penalty=0.1),
        "steps": 1,
    },
    "sgd, policy gradient, ragged": {
        "optimizer": OptimizerConfig(),
        "workload": WorkloadConfig(data=Data.policy),
        "split": Split.ragged,
        "steps": 1,
    },
    "momentum, pairs with BatchNorm": {"optimizer": MOMENTUM, "workload": PAIRS, "norm": Norm.batch, "steps": 1},
    # Under a schedule that moves, and with a decay that Adam takes into its gradient.
    "adam, cosine, perceptron": {
        "optimizer": OptimizerConfig(name=OptimizerName.adam, lr=0.01, weight_decay=0.05),
        "schedule": ScheduleConfig(name=ScheduleName.cosine),
        "workload": WorkloadConfig(model=Model.mlp),
        "steps": 6,
        "seed": 11,
    },
    "adamw, always clipped": {"optimizer": ADAMW, "norm": Norm.group, "clip_norm": 1e-3},
    "sgd, clipping configured and never active": {"optimizer": OptimizerConfig(), "clip_norm": 1e3},
    "sgd, BatchNorm": {"optimizer": OptimizerConfig(), "norm": Norm.batch},
    "momentum, BatchNorm, ragged": {"optimizer": MOMENTUM, "norm": Norm.batch, "split": Split.ragged, "ema_decay": 0.5},
    "momentum, float16, ragged, clipped": {"optimizer": MOMENTUM, **FLOAT16},
    "sgd, divisible": {"optimizer": OptimizerConfig(weight_decay=0.1), "data": DataConfig(last_window=LastWindow.drop)},
    "adamw, text": {"workload": TEXT, "norm": Norm.layer, "optimizer": ADAMW, "algebra_steps": 3, "effective_batch": 16},
    "adam, bfloat16, N = 3": {
        "optimizer": OptimizerConfig(name=OptimizerName.adam, lr=2e-3),
        "precision": Precision.bfloat16,
        "effective_batch": 300,
        "accumulation_steps": (3,),
        "norm": Norm.group,
    },
}

QUICK = ("adam, cosine, perceptron",)  # the others take ten to thirty seconds each


def setting(name):
    defaults = {"steps": 2, "effective_batch": 320, "algebra_steps": 6}
    return TrialConfig(**{**defaults, "accumulation_steps": (4,), **SETTINGS[name]})


def judged(name):
    """All faults as arms of one trial, beside the correct ones."""
    config = setting(name)
    return {row["arm"]: row for row in run_trial(config, lambda step, rows: None, with_faults(config, PLANTED)).arms}


def test_a_window_may_lose_its_only_micro_batch_in_float16():
    """The scaler takes no step without a gradient; a trial with such a window has a verdict."""
    config = TrialConfig(accumulation_steps=(1,), steps=2, algebra_steps=2, precision=Precision.float16)
    (fault,) = [fault for fault in FAULTS if fault.cause == Cause.non_finite_micro_batch]
    wrong = Candidate(fault.cause, fault.apply(Recipe(accumulation_steps=1, split=split_plan(config, 1))))
    result = run_trial(config, lambda step, rows: None, [*standard_candidates(config), wrong])
    rows = {row["arm"]: row for row in result.arms}
    assert rows["accumulated"]["verdict"] == "equivalent"
    assert (rows[fault.cause]["verdict"], rows[fault.cause]["cause"]) == ("different", fault.cause)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.slow
def test_two_faults_give_two_causes_or_unexplained():
    by_id = {fault.id: fault for fault in FAULTS}
    config = TrialConfig(accumulation_steps=(4,), steps=1, effective_batch=320, algebra_steps=6, optimizer=ADAMW)
    right = Recipe(accumulation_steps=4, split=split_plan(config, 4))
    arms = [Candidate(f"{a}{b}", by_id[a].apply(by_id[b].apply(right))) for a, b in BOTH_NAMED]
    rows = run_trial(config, lambda step, rows: None, [*standard_candidates(config), *arms]).arms[2:]
    for ((a, b), both), row in zip(BOTH_NAMED.items(), rows, strict=True):
        named, true = set(row["cause"].split("+")), {by_id[a].cause, by_id[b].cause}
        assert row["verdict"] == "different"
        assert named == (true if both else {"unexplained"}), (a, b, row["cause"])


def test_the_catalogue_is_complete_and_honest():
    """Every cause is planted here, is a setting of a trial, on ranks, told by audits, or a method; in one way alone."""
    planted = [fault.cause for fault in FAULTS]
    # By its gradient alone the first is a loss scale that changes inside the window; only an audit sees gradients being scaled.
    elsewhere = (Cause.sum_rescaled_in_window, Cause.memory_bank)
    assert sorted([*planted, *INHERENT, *ON_RANKS, *elsewhere]) == sorted(set(Cause) - {Cause.unexplained})
    assert all(fault.summary and "#" in (fault.apply.__doc__ or "") for fault in FAULTS), "each cites a thread"
    assert set(ON_RANKS) == {replicas.expected(name, True) for name in {**SCALED, **UNSYNCHRONISED}}
