"""Both sides of the overhead train the same arms."""

from __future__ import annotations

import pytest

from accumulation_harness.bench import overhead
from accumulation_harness.config import Model, Norm, TrialConfig, WorkloadConfig

TRIAL = TrialConfig(
    workload=WorkloadConfig(model=Model.mlp),
    norm=Norm.layer,
    effective_batch=12,
    accumulation_steps=(3,),
    steps=4,
    algebra_steps=2,
)


def test_the_ratio_compares_the_same_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sides are compared to the bit before they are timed; bare loops that train something else are refused."""
    found = {one.name: one for one in overhead.of_workload("mlp", TRIAL, rounds=1)}
    assert found["mlp: whole trial, with L0 and L1"].wall.median > found["mlp: training phase, probe_every=10"].wall.median > 0
    right = overhead.bare_arms
    monkeypatch.setattr(overhead, "bare_arms", lambda *given: {label: loss + 1e-6 for label, loss in right(*given).items()})
    with pytest.raises(AssertionError, match="bare loops and trial differ in"):
        next(overhead.of_workload("mlp", TRIAL, rounds=1))


def test_a_trial_that_is_not_ours_has_its_own_name() -> None:
    assert list(overhead.named([TRIAL])) == [TRIAL.workload.label]
    assert list(overhead.named([])) == list(overhead.NAMES)
