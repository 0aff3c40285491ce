"""The audit of hand-written loops: every right one is equivalent, every wrong one has its cause and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from accumulation_harness.audit import audit
from accumulation_harness.audit.allowed import with_allowed
from accumulation_harness.judge.cause import Cause
from scoreboard import data
from tests.audit.loops import (
    empty,
    frame,
    habits,
    held_out,
    lookalikes,
    lost_gradients,
    mixed_losses,
    order_seeds,
    others_code,
    own_weights,
    right_loops,
    unusual_loops,
    wrong_loops,
)
from tests.audit.loops.frame import Loop

BOTH = (unusual_loops, mixed_losses, lookalikes, lost_gradients, habits, order_seeds, own_weights, held_out, others_code)
RIGHT = [loop for module in (right_loops, *BOTH) for loop in module.RIGHT]
WRONG = {loop: causes for module in (wrong_loops, *BOTH) for loop, causes in module.WRONG.items()}
# At some N of 2, 8 and 16 another cause fits as well, or nothing can run (the spread of one row): they are wrong all the same.
NAMED_OTHERWISE = {"noise_per_micro_batch", "scale_grows_by_hand", "advantages_per_micro_batch", "float16_underflow",
                   "load_balance_in_full", "clamped_aside", "padding_counted_by_part"}  # fmt: skip
SPLITS = [loop for loop in WRONG if "norm" not in loop.__name__]


def name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    yield
    lookalikes.KEPT.clear()


def test_every_loop_is_audited() -> None:
    assert (len(RIGHT), len(WRONG)) == (84, 133)


@pytest.mark.parametrize("train", RIGHT, ids=name)
def test_a_right_loop_is_equivalent(train: Loop) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert report.equivalent, str(report)
    assert report.exit_code == 0
    gradients = report.frame[report.frame.tensor == "all"]
    assert (gradients.distance <= gradients.gate).all() and (gradients.gate < 0.2).all()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("train", "causes"),
    [pytest.param(train, causes, id=name(train)) for train, causes in WRONG.items()],
)
def test_a_wrong_loop_has_its_cause_and_no_other(train: Loop, causes: set[str]) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert {finding.cause for finding in report.findings} == causes, str(report)
    assert not report.equivalent and report.exit_code == 1 and not report.problems
    assert all(finding.message and finding.evidence for finding in report.findings)
    for allowed in (*({cause} for cause in Cause), set(causes), set(Cause)):
        told = with_allowed(report, allowed)
        compared = all(step.agrees for arm in told.results for item in arm.facts for step in item.steps)
        without = {finding.cause for finding in told.allowed} <= {Cause.stochastic_layers, Cause.batch_statistics}
        assert told.status != "equivalent" or (causes <= allowed and (compared or without)), (allowed, str(told))


def test_a_clip_that_nobody_sees_hides_no_mean_of_means() -> None:
    """At N=16 alone gradients are long enough: the sum is that of means, and shorter than it was added up."""
    report = audit(held_out.shortened_by_hand_of_means, batch_size=16, accumulation_steps=(16,))
    assert {finding.cause for finding in report.findings} == held_out.WRONG[held_out.shortened_by_hand_of_means], str(report)


SAID = own_weights.SAID | others_code.SAID


@pytest.mark.parametrize(("train", "words"), SAID.items(), ids=map(name, SAID))
def test_what_is_said_of_unusual_weights(train: Loop, words: str) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert words in report.findings[0].message


def _means_added(batch_size: int, accumulation_steps: int) -> None:
    """Means over each micro-batch's own tokens are added, in the short window at the end of an epoch as well."""
    frame.train(batch_size, accumulation_steps, data.language_model(), frame.own_token_mean)


def test_means_that_are_added_are_named_in_every_window() -> None:
    report = audit(_means_added, batch_size=16, accumulation_steps=(4,))
    assert {f.cause: f.steps for f in report.findings} == dict.fromkeys(["mean_of_means", "loss_not_divided"], tuple(range(6)))


@pytest.mark.parametrize(("train", "words"), empty.EMPTY.items(), ids=map(name, empty.EMPTY))
def test_nothing_compared_is_never_equivalent(train: Loop, words: str) -> None:
    empty.CALLS.clear()
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert report.status == "inconclusive" and report.exit_code == 2 and not report.findings
    assert any(words in problem for problem in report.problems), report.problems


@pytest.mark.parametrize("train", order_seeds.RIGHT, ids=name)
def test_another_order_that_changes_more_is_not_taken_for_rounding(train: Loop) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert any("says nothing of rounding" in line for line in report.hidden)
    assert report.frame.gate.max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("train", [loop for loop in RIGHT if loop.__name__ != "ghost_batch_norm"], ids=name)
def test_a_right_loop_is_equivalent_with_one_row_each(train: Loop) -> None:
    report = audit(train, batch_size=16, accumulation_steps=(2, 8, 16))
    assert report.equivalent, str(report)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("train", SPLITS, ids=name)
def test_a_wrong_loop_has_its_cause_with_other_splits(train: Loop) -> None:
    causes = WRONG[train]
    report = audit(train, batch_size=16, accumulation_steps=(2, 8, 16))
    assert not report.equivalent
    for n in (2, 8, 16) if name(train) not in NAMED_OTHERWISE else ():
        assert {f.cause for f in report.findings if f.accumulation_steps == n} == causes, str(report)
