"""Rare faults, and the right loops that resemble them: one is named, the other is equivalent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.audit import audit
from tests.audit.loops.lookalikes import KEPT, RIGHT, WRONG


def name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


@pytest.mark.parametrize("train", RIGHT, ids=name)
def test_a_right_loop_is_equivalent(train: Callable[..., Any]) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    KEPT.clear()
    assert report.equivalent, str(report)


@pytest.mark.parametrize("train", WRONG, ids=name)
def test_a_wrong_loop_has_its_cause_and_no_other(train: Callable[..., Any]) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert {finding.cause for finding in report.findings} == WRONG[train], str(report)
