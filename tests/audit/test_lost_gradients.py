"""Target networks, gradients cleared before they are used, and checkpoints inside a window: right ones and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.audit import audit
from tests.audit.loops.lost_gradients import (
    AT_EVERY_N,
    RIGHT,
    WRONG,
    cleared_after_the_step,
    cleared_before_the_step,
    head_cleared_before_the_step,
)


def name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


@pytest.mark.parametrize("train", RIGHT, ids=name)
def test_a_right_loop_is_equivalent(train: Callable[..., Any]) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert report.equivalent, str(report)


@pytest.mark.parametrize("train", WRONG, ids=name)
def test_a_wrong_loop_has_its_cause_and_no_other(train: Callable[..., Any]) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert {finding.cause for finding in report.findings} == WRONG[train], str(report)


@pytest.mark.parametrize("train", AT_EVERY_N, ids=name)
def test_gradients_cleared_at_every_n_show_beside_a_reference(train: Callable[..., Any]) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,), reference=cleared_after_the_step)
    assert {(f.accumulation_steps, f.cause) for f in report.findings} == {(n, c) for n in (1, 4) for c in AT_EVERY_N[train]}


def test_a_reference_is_equivalent_to_itself() -> None:
    assert audit(cleared_after_the_step, batch_size=16, accumulation_steps=(4,), reference=cleared_after_the_step).equivalent


def test_steps_without_gradients_are_no_equivalence() -> None:
    report = audit(cleared_before_the_step, batch_size=16, accumulation_steps=(4,))
    assert report.status == "inconclusive" and "steps without gradients" in report.problems[0]
    hidden = audit(head_cleared_before_the_step, batch_size=16, accumulation_steps=(4,)).hidden
    assert any("2.bias, 2.weight are cleared before every step" in line for line in hidden)
