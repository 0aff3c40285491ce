"""What the study says of one window, against torch's own layers, the law of total variance and formulas by hand."""

import dataclasses
import itertools

import pytest
import torch

from accumulation_harness.config import (
    Norm,
)
from accumulation_harness.recipes.remedies import REMEDIES
from accumulation_harness.referee.gradients import relative_distance
from tests.studies.by_hand import Loop
from tests.trials import measured, trial

EXACT = 1e-12
CONFIG = trial(
    "study=batch_statistics workload.model=mlp norm=batch precision=float64 effective_batch=48 accumulation_steps=[3,12] steps=4",
    "seed=2 optimizer.name=momentum optimizer.lr=0.05",
)


@pytest.fixture(scope="module")
def rows():
    return measured(CONFIG)


def chosen(rows, arm, n, *, after_steps=0, momentum=0.1):
    key = {"arm": arm, "accumulation_steps": n, "after_steps": after_steps, "momentum": momentum}
    (row,) = (row for row in rows if key.items() <= row.items())
    return row


@pytest.mark.parametrize("n", CONFIG.accumulation_steps)
def test_differences_of_gradient_and_buffers(rows, n):
    (full, buffers), (accumulated, moved) = Loop(CONFIG).gradients(1), Loop(CONFIG).gradients(n)
    start = torch.cat([torch.zeros(64), torch.ones(64)] * 2).double()
    row = chosen(rows, "accumulated", n)
    assert row["gradient_error"] == pytest.approx(relative_distance(accumulated, full), rel=1e-9)
    assert row["statistics_error"] == pytest.approx(relative_distance(moved - start, buffers - start), rel=1e-9)
    assert row["gradient_error"] > 0.1 and row["oracle_error"] < EXACT and row["oracle_statistics_error"] < EXACT
    assert row["influence"] == 0.0, "a training forward does not read the running statistics"
    assert (row["micro_batch"], row["forwards"]) == (48 // n, 1.0)


@pytest.mark.parametrize("n, m", list(itertools.product(CONFIG.accumulation_steps, (0.01, 0.1, 0.5))))
def test_effective_momentum_is_the_weight_of_what_was_there_before(rows, n, m):
    old = 1.0
    for _ in range(n):
        old *= 1 - m
    for after_steps in (0, 4):
        plain = chosen(rows, "accumulated", n, after_steps=after_steps, momentum=m)
        corrected = chosen(rows, "corrected_momentum", n, after_steps=after_steps, momentum=m)
        assert plain["effective_momentum"] == pytest.approx(1 - old, abs=EXACT)
        assert corrected["effective_momentum"] == pytest.approx(m, abs=EXACT)
        assert corrected["change"] < EXACT and plain["effective_momentum"] - m > 0.005


@pytest.mark.parametrize("n", CONFIG.accumulation_steps)
@pytest.mark.parametrize("after_steps", [0, 4])
def test_what_remedies_mend(rows, n, after_steps):
    own = {arm: chosen(rows, arm, n, after_steps=after_steps) for arm in REMEDIES}
    two_pass, detached = own["two_pass_statistics"], own["detached_statistics"]
    assert max(two_pass["gradient_error"], two_pass["statistics_error"]) < EXACT
    assert (two_pass["forwards"], detached["forwards"]) == (5.0, 3.0), "two layers: 2L + 1 and L + 1"
    assert detached["statistics_error"] < EXACT < 0.1 < detached["gradient_error"]
    pooled = own["window_statistics"]
    assert pooled["first_statistics_error"] < EXACT < 1e-3 < pooled["statistics_error"]
    assert pooled["change"] < EXACT < 0.1 < pooled["gradient_error"]
    assert own["corrected_momentum"]["first_statistics_error"] > 1e-4, "its micro-batches weigh unequally"
    assert own["ghost_full_batch"]["change"] < EXACT < 0.1 < own["ghost_full_batch"]["gradient_error"]
    for arm in ("frozen_statistics", "detached_statistics", "two_pass_statistics"):
        assert own[arm]["split_error"] < EXACT
    for arm in ("corrected_momentum", "window_statistics", "ghost_full_batch"):
        assert own[arm]["split_error"] > 0.1
    assert own["frozen_statistics"]["gradient_error"] > 0.1


def test_group_norm_is_exact_at_every_n():
    rows = measured(dataclasses.replace(CONFIG, norm=Norm.group))
    assert {row["arm"] for row in rows} == {"accumulated"} and len(rows) == 4
    assert max(row["gradient_error"] for row in rows) < EXACT
