"""Gradients that are cleared before they are used, at every N; `test_loops.py` audits the other loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accumulation_harness.audit import audit
from tests.audit.loops.lost_gradients import (
    AT_EVERY_N,
    cleared_after_the_step,
    cleared_before_the_step,
    head_cleared_before_the_step,
)


@pytest.mark.parametrize("train", AT_EVERY_N, ids=lambda loop: loop.__name__)
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
