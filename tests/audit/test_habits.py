"""What released trainers do beside the loop: no false alarm by it, and the fault beneath it is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.audit import audit
from tests.audit.loops import habits


def name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


@pytest.mark.parametrize("train", habits.RIGHT, ids=name)
def test_a_right_loop_is_equivalent(train: Callable[..., Any]) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert report.equivalent, str(report)


@pytest.mark.parametrize("train", habits.WRONG, ids=name)
def test_a_wrong_loop_has_its_cause_and_no_other(train: Callable[..., Any]) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert {finding.cause for finding in report.findings} == habits.WRONG[train], str(report)
    assert not report.problems, str(report)


def test_an_update_that_jumps_under_rounding_is_told() -> None:
    told = "not what it makes of them"
    assert any(told in line for line in audit(habits.eigenvectors, batch_size=16, accumulation_steps=(4,)).hidden)
    assert not any(told in line for line in audit(habits.count_among_states, batch_size=16, accumulation_steps=(4,)).hidden)


def test_sequences_of_vectors_have_lengths() -> None:
    report = audit(habits.padded_vectors, batch_size=16, accumulation_steps=(4,))
    assert not any("weighs the same" in line for line in report.hidden)
