"""The hand-written loops that are audited, and what is said beside a verdict; the verdicts are rows of the golden table."""

import pytest

from accumulation_harness.audit.allowed import with_allowed
from accumulation_harness.judge.cause import Cause
from scoreboard import data
from tests.audit.asked import audited, causes_of, named
from tests.audit.loops import (
    empty,
    frame,
    habits,
    held_out,
    kept_states,
    lookalikes,
    lost_gradients,
    mixed_losses,
    odd_loops,
    order_seeds,
    others_code,
    own_weights,
    right_loops,
    unusual_loops,
    wrong_loops,
)
from tests.slow import few

BOTH = (
    unusual_loops,
    mixed_losses,
    lookalikes,
    lost_gradients,
    habits,
    order_seeds,
    own_weights,
    held_out,
    others_code,
    kept_states,
)
RIGHT = [loop for module in (right_loops, *BOTH) for loop in module.RIGHT]
WRONG = {loop: causes for module in (wrong_loops, *BOTH) for loop, causes in module.WRONG.items()}


@pytest.fixture(autouse=True)
def kept():
    yield
    lookalikes.KEPT.clear()


def nothing_is_hidden_by_what_is_allowed(report):
    """A wrong loop is equivalent only where all its causes are allowed, and gradients were compared or are known to be apart."""
    causes = causes_of(report)
    for allowed in (*({cause} for cause in Cause), causes, set(Cause)):
        told = with_allowed(report, allowed)
        compared = all(step.agrees for arm in told.results for item in arm.facts for step in item.steps)
        without = {finding.cause for finding in told.allowed} <= {Cause.stochastic_layers, Cause.batch_statistics}
        assert told.verdict != "equivalent" or (causes <= allowed and (compared or without)), (allowed, str(told))


SAID = own_weights.SAID | others_code.SAID | odd_loops.SAID  # words of the first finding
HIDDEN = {  # words of what could not be seen
    **dict.fromkeys(order_seeds.RIGHT, "cannot be used to measure rounding"),
    habits.eigenvectors: "not what it makes of them",
    lost_gradients.head_cleared_before_the_step: "2.bias, 2.weight are cleared before every step",
    odd_loops.two_parts_at_one: "N=1 takes its batch in 2 parts itself",
}
TOLD = [*dict.fromkeys([*odd_loops.RIGHT, *odd_loops.WRONG, *SAID, *HIDDEN])]
FAST = (*TOLD[::8], *order_seeds.RIGHT[:1], lost_gradients.head_cleared_before_the_step)


@pytest.mark.parametrize("train", few(FAST, TOLD))
def test_what_is_said_beside_a_verdict(train):
    report = named(train, *(WRONG | odd_loops.WRONG).get(train, ()))
    assert train not in SAID or SAID[train] in report.findings[0].message
    assert train not in HIDDEN or any(HIDDEN[train] in line for line in report.hidden), report.hidden
    assert train not in order_seeds.RIGHT or report.frame.gate.max() < 1e-3, "another order is not taken for rounding"


def test_a_state_that_nothing_reads_may_be_a_log():
    report = audited(kept_states.mean_of_inputs_for_later)
    assert report.verdict == "inconclusive" and "mean` is off by" in report.problems[0], str(report)


def _means_added(batch_size, accumulation_steps):
    """Means over each micro-batch's own tokens are added, in the short window at the end of an epoch as well."""
    frame.train(batch_size, accumulation_steps, data.language_model(), frame.own_token_mean)


def test_means_that_are_added_are_named_in_every_window():
    report = audited(_means_added)
    assert {f.cause: f.steps for f in report.findings} == dict.fromkeys(["mean_of_means", "loss_not_divided"], tuple(range(6)))


def _divided_by_rows(batch_size, accumulation_steps):
    divisor = batch_size if accumulation_steps > 1 else 1
    frame.train(batch_size, accumulation_steps, data.model(), frame.divided(frame.own_mean, divisor), windows=frame.full_windows)


def test_a_number_that_is_right_by_chance_certifies_nothing():
    report = audited(_divided_by_rows)
    assert [(f.accumulation_steps, f.cause) for f in report.findings] == [(2, "counter_wrong")]
    assert "with 4 rows in each of 4 micro-batches nothing differs" in report.problems_of(4)[0]


def slow_but_the_first(cases):
    """Of those that come to the same."""
    said = [*cases.values()]
    return few([case for k, case in enumerate(cases.items()) if case[1] not in said[:k]], cases.items())


@pytest.mark.parametrize(("train", "words"), slow_but_the_first(empty.EMPTY))
def test_nothing_compared_is_never_equivalent(train, words):
    empty.CALLS.clear()
    report = audited(train)
    assert report.verdict == "inconclusive" and report.exit_code == 2 and not report.findings
    assert any(words in problem for problem in report.problems), report.problems


@pytest.mark.parametrize(("train", "causes"), slow_but_the_first(lost_gradients.AT_EVERY_N))
def test_gradients_cleared_at_every_n_show_beside_a_reference(train, causes):
    report = audited(train, reference=lost_gradients.cleared_after_the_step)
    assert {(f.accumulation_steps, f.cause) for f in report.findings} == {(n, cause) for n in (1, 4) for cause in causes}


def _cleared(batch_size, accumulation_steps):
    """Of each micro-batch a first backward is looked at and cleared, in more windows than are looked at closely."""
    model = data.model()
    optimizer = frame.sgd(model)
    for window in data.windows(batch_size * accumulation_steps, 7, keep=False):
        for ids in window.split(batch_size):
            losses = frame.ce(model(frame.X[ids]), frame.Y[ids], reduction="none")
            losses.mean().backward(retain_graph=True)
            optimizer.zero_grad()
            (losses * losses.detach()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_windows_that_are_cleared_have_no_second_name():
    named(_cleared, Cause.gradients_cleared_in_window)
