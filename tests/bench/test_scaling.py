"""The workloads of the bench are as large as their names say, and both of its arms train them alike."""

from __future__ import annotations

import pytest
import torch

from accumulation_harness.bench import scaling
from accumulation_harness.measure.lock_step import REFERENCE
from accumulation_harness.recipes.recipe import take_step
from accumulation_harness.referee.gradients import flatten, relative_distance


@pytest.mark.parametrize("size", [10**3, 10**4, 10**6])
def test_wide_has_that_many_parameters(size: int) -> None:
    assert sum(p.numel() for p in scaling.wide(size).make_model().parameters()) == pytest.approx(size, rel=0.05)


def test_deep_has_that_many_tensors() -> None:
    assert [p.numel() for p in scaling.deep(7).make_model().parameters()] == [16] * 7


def test_both_arms_take_the_same_step() -> None:
    arms = scaling.two_arms(scaling.wide(1000), 4)
    reference, accumulated = arms
    assert reference == REFERENCE
    for arm in arms.values():
        before = flatten(arm.model.parameters())
        take_step(arm, arm.workload.batch(torch.arange(scaling.SAMPLES)))
        assert not torch.equal(flatten(arm.model.parameters()), before)
    one, four = (flatten(arm.model.parameters()) for arm in arms.values())
    assert relative_distance(four, one) < 1e-6
    assert len(arms[accumulated].seen) == 4
