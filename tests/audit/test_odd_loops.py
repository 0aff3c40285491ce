"""What an attack on the audit has shown: no false alarm, nothing wrong certified, and what is said of each."""

from __future__ import annotations

from typing import Any

import pytest

from accumulation_harness.audit import audit
from tests.audit.loops import odd_loops
from tests.audit.loops.frame import Loop
from tests.audit.test_loops import name

QUICK = (odd_loops.clipped_times_n_then_divided, odd_loops.clipped_to_another_limit, odd_loops.pulled_back_after_the_step)


def _marked(loop: Loop) -> Any:
    return pytest.param(loop, id=name(loop), marks=() if loop in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("train", [_marked(loop) for loop in odd_loops.RIGHT])
def test_a_right_loop_that_looks_wrong_is_equivalent(train: Loop) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert report.equivalent, str(report)


@pytest.mark.parametrize("train", [_marked(loop) for loop in odd_loops.WRONG])
def test_a_wrong_loop_is_told_as_what_it_is(train: Loop) -> None:
    cause, words = odd_loops.WRONG[train]
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert {finding.cause for finding in report.findings} == {cause}, str(report)
    assert words in report.findings[0].message
    assert report.exit_code == 1


def test_a_loop_that_takes_no_notice_of_its_arguments_is_not_judged() -> None:
    report = audit(odd_loops.always_two_parts, batch_size=16, accumulation_steps=(4,))
    assert report.exit_code == 2 and "does not use its arguments" in report.problems[0]


@pytest.mark.slow
def test_a_reference_that_accumulates_is_told() -> None:
    (told,) = (
        line for line in audit(odd_loops.two_parts_at_one, batch_size=16, accumulation_steps=(4,)).hidden if "parts" in line
    )
    assert told.startswith("N=1 takes its batch in 2 parts itself")
    told_of_right = audit(odd_loops.clipped_times_n_then_divided, batch_size=16, accumulation_steps=(4,)).hidden
    assert not any("parts itself" in line for line in told_of_right)
