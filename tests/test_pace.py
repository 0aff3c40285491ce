"""The share of a trial's work that is told on its way."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from accumulation_harness.config import Norm, TrialConfig
from accumulation_harness.measure import ablation, studies
from accumulation_harness.measure.trial import run_trial
from accumulation_harness.results.measurements import Measurements
from accumulation_harness.system import pace

SMALL = TrialConfig(effective_batch=16, accumulation_steps=(4,), steps=6, algebra_steps=4, nulls=2)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every share that is told, without a pause between two."""
    shares: list[float] = []
    monkeypatch.setattr(pace, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(pace, "_pace", None)
    pace.listen(shares.append)
    return shares


def test_a_share_is_of_the_work_as_it_is_known() -> None:
    one = pace.Pace(print, {"first": 4.0, "second": 6.0}, done=2.0, in_phase=2.0)
    assert one.share == 2 / 10
    one.done = one.in_phase = 9.0
    assert one.share == 9 / 15, "a phase that takes longer than planned leaves the next one's work"


def test_a_trial_is_planned_as_it_goes(told: list[float]) -> None:
    """Each phase takes about what was planned, so that the share rises as the work does."""
    run_trial(SMALL, lambda step, rows: None)
    assert told == sorted(told) and 0 < told[0] < 0.1 and told[-1] == 1
    steps = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert max(steps) < 0.2, "no phase jumps"


def test_taking_different_arms_apart_is_work_too(told: list[float]) -> None:
    run_trial(dataclasses.replace(SMALL, norm=Norm.batch), lambda step, rows: None)
    assert told[-1] == 1 and told[-1 - len(ablation.REMOVALS)] < 0.95


def test_what_another_trial_has_measured_is_no_work(told: list[float], tmp_path: Path) -> None:
    """The second trial begins with its training."""
    for seen in range(2):
        told.clear()
        pace.listen(told.append)
        run_trial(SMALL, lambda step, rows: None, shared=Measurements(tmp_path, f"trial {seen}"))
    assert told[-1] == 1 and len(told) == SMALL.steps
    assert told == pytest.approx([(step + 1) / SMALL.steps for step in range(SMALL.steps)])


def test_a_study_counts_its_windows(told: list[float]) -> None:
    studies.run(dataclasses.replace(SMALL, study="convergence"), lambda step, rows: None)
    assert told == pytest.approx([(step + 1) / SMALL.steps for step in range(SMALL.steps)])


def test_nobody_is_told_who_does_not_listen() -> None:
    run_trial(SMALL, lambda step, rows: None)
    assert pace._pace is None
