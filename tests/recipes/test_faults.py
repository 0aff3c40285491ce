"""The planted faults: their settings, in which the golden table says what each is called, and what is asked of them besides."""

import pytest

from accumulation_harness.experiments.replicas import replicas
from accumulation_harness.judge.cause import INHERENT, ON_RANKS, Cause
from accumulation_harness.measure.ranks import SCALED, UNSYNCHRONISED
from accumulation_harness.measure.trial import with_faults
from accumulation_harness.recipes.catalogue import FAULTS, named
from tests.trials import arms, trial

ADAMW = "optimizer.name=adamw optimizer.lr=3e-3 optimizer.weight_decay=0.1"
MOMENTUM = "optimizer.name=momentum optimizer.lr=0.05"
ADAM = "optimizer.name=adam"

# Two faults whose marks are apart are both named; of two that change the same gradient nothing is said.
BOTH_NAMED = {
    ("F1", "F9"): True, ("F3", "F29"): True, ("F2", "F30"): True, ("F6", "F2"): False, ("F1", "F31"): False, ("F18", "F1"): False,
}  # fmt: skip
PLANTED = {fault.id: fault.apply for fault in FAULTS}
SETTINGS = {
    "adamw with moving average and a penalty": f"{ADAMW} ema_decay=0.9 workload.penalty=0.1 steps=1",
    "sgd, policy gradient, ragged": "workload.data=policy split=ragged steps=1",
    "momentum, pairs with BatchNorm": (f"{MOMENTUM} workload.data=pairs workload.model=mlp workload.width=2 norm=batch steps=1"),
    # Under a schedule that moves, and with a decay that Adam takes into its gradient.
    "adam, cosine, perceptron": (
        f"{ADAM} optimizer.lr=0.01 optimizer.weight_decay=0.05 schedule.name=cosine workload.model=mlp steps=6 seed=11"
    ),
    "adamw, always clipped": f"{ADAMW} norm=group clip_norm=1e-3",
    "sgd, clipping configured and never active": "clip_norm=1e3",
    "sgd, BatchNorm": "norm=batch",
    "momentum, BatchNorm, ragged": f"{MOMENTUM} norm=batch split=ragged ema_decay=0.5",
    "momentum, float16, ragged, clipped": f"{MOMENTUM} precision=float16 clip_norm=0.5 split=ragged",
    "sgd, divisible": "optimizer.weight_decay=0.1 data.last_window=drop",
    "adamw, text": (
        f"workload.data=text workload.model=transformer workload.depth=1 norm=layer {ADAMW} algebra_steps=3 effective_batch=16"
    ),
    "adam, bfloat16, N = 3": f"{ADAM} optimizer.lr=2e-3 precision=bfloat16 effective_batch=300 accumulation_steps=[3] norm=group",
}

QUICK = ("adam, cosine, perceptron",)  # the others take ten to thirty seconds each


def setting(name):
    return trial("steps=2 effective_batch=320 algebra_steps=6 accumulation_steps=[4]", SETTINGS[name])


def judged(name):
    """All faults as arms of one trial, beside the correct ones."""
    config = setting(name)
    return {row["arm"]: row for row in arms(config, with_faults(config, PLANTED))}


def test_a_window_may_lose_its_only_micro_batch_in_float16():
    """The scaler takes no step without a gradient; a trial with such a window has a verdict."""
    config, cause = trial("accumulation_steps=[1] steps=2 algebra_steps=2 precision=float16"), "non_finite_micro_batch"
    rows = {row["arm"]: row for row in arms(config, with_faults(config, {cause: named(cause, config.precision)}))}
    assert rows["accumulated"]["verdict"] == "equivalent"
    assert (rows[cause]["verdict"], rows[cause]["cause"]) == ("different", cause)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.slow
def test_two_faults_give_two_causes_or_unexplained():
    by_id = {fault.id: fault for fault in FAULTS}
    config = trial("accumulation_steps=[4] steps=1 effective_batch=320 algebra_steps=6", ADAMW)
    both = {a + b: lambda recipe, a=a, b=b: by_id[a].apply(by_id[b].apply(recipe)) for a, b in BOTH_NAMED}
    rows = arms(config, with_faults(config, both))[2:]
    for ((a, b), are_named), row in zip(BOTH_NAMED.items(), rows, strict=True):
        found, true = set(row["cause"].split("+")), {by_id[a].cause, by_id[b].cause}
        assert row["verdict"] == "different"
        assert found == (true if are_named else {"unexplained"}), (a, b, row["cause"])


def test_the_catalogue_is_complete_and_honest():
    """Every cause is planted here, is a setting of a trial, on ranks, told by audits, or a method; in one way alone."""
    planted = [fault.cause for fault in FAULTS]
    # By its gradient alone the first is a loss scale that changes inside the window; only an audit sees gradients being scaled.
    elsewhere = (Cause.sum_rescaled_in_window, Cause.memory_bank)
    assert sorted([*planted, *INHERENT, *ON_RANKS, *elsewhere]) == sorted(set(Cause) - {Cause.unexplained})
    assert all(fault.summary and "#" in (fault.apply.__doc__ or "") for fault in FAULTS), "each cites a thread"
    assert set(ON_RANKS) == {replicas.expected(name, True) for name in {**SCALED, **UNSYNCHRONISED}}
