"""Processor time is credited to the phase and the module that spent it."""

from __future__ import annotations

import dataclasses
import hashlib
import signal
import time

import pytest

from accumulation_harness.bench import profile
from accumulation_harness.bench.measurement import Measurement
from accumulation_harness.config import Model, TrialConfig, WorkloadConfig

TRIAL = TrialConfig(
    workload=WorkloadConfig(model=Model.mlp), effective_batch=16, accumulation_steps=(4,), steps=40, algebra_steps=16
)


def by_phase(measures: list[Measurement]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in measures:
        phase = one.name.split(": ")[1]
        found[phase] = found.get(phase, 0.0) + one.wall.median
    return found


def test_shares_add_up_and_follow_the_work() -> None:
    """Twenty times as many float64 windows: L0 takes a larger share, and training a smaller one."""
    list(profile.of_trial("mlp", TRIAL, rounds=1))  # what is imported late is no part of L0
    few = list(profile.of_trial("mlp", TRIAL, rounds=1))
    many = list(profile.of_trial("mlp", dataclasses.replace(TRIAL, algebra_steps=320), rounds=1))
    for measures in (few, many):
        assert sum(one.wall.median for one in measures) == pytest.approx(100)
        assert {one.name for one in measures} >= {
            "mlp: training: recipe, backward",
            "mlp: L0: recipe, backward",
            "mlp: L0: oracle",
        }
    assert by_phase(many)["L0"] > 1.3 * by_phase(few)["L0"]
    assert by_phase(many)["training"] < by_phase(few)["training"]


def test_a_call_in_which_no_interrupt_is_served_is_credited_in_full() -> None:
    with profile.Sampler() as sampler:
        began = time.process_time()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)
        spent = time.process_time() - began
        time.sleep(0)
    assert spent > 0.1 and sum(sampler.seconds.values()) == pytest.approx(spent, rel=0.1)
    assert set(sampler.seconds) == {("other", "outside the harness")}
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
