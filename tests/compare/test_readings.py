"""Weights of drawn windows, computed from how their loss was divided: the reading is that, or it says what else it may be."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumulation_harness.compare.readings import Constant, Weighed, told
from accumulation_harness.judge.cause import Cause
from tests.strategies import fixed

N = 4
# Sizes: loss terms of the micro-batches of each window
sizes = st.lists(st.lists(st.integers(2, 9), min_size=N, max_size=N), min_size=3, max_size=5)


def weighed(terms, each, constants=()):
    """A window whose loss terms weigh so much each; right is one over their number."""
    total = sum(terms)
    return Weighed(
        window=0, shares=tuple(float(c * total) for c in each), terms=tuple(map(float, terms)), num=len(terms),
        rows=tuple(n // 2 for n in terms), positions=tuple(n + 1 for n in terms),
        constants=None if constants is None else tuple(constants),
    )  # fmt: skip


def means(terms, by):
    """Each micro-batch's mean, divided by a number."""
    return weighed(terms, [1 / (n * by) for n in terms], [Constant(float(1 / by), divides=True)] if by != 1 else [])


def sums(terms, by):
    return weighed(terms, [1 / by] * len(terms), [Constant(float(1 / by), divides=True)])


def equal(runs):
    return any(len(set(terms)) == 1 for terms in runs)


@fixed(60)
@given(sizes)
def test_the_window_divided_by_its_terms_is_right_and_twice_or_not_at_all_is_not(runs):
    assert told([sums(terms, Fraction(sum(terms))) for terms in runs], N).right
    twice = [weighed(t, [Fraction(1, sum(t) * N)] * N, [Constant(1 / sum(t), True), Constant(1 / N, True)]) for t in runs]
    assert told(twice, N).causes == (Cause.loss_divided_twice,)
    undone = [weighed(t, [Fraction(N, sum(t))] * N, [Constant(1 / sum(t), True), Constant(N)]) for t in runs]
    assert "loss not divided, or a coefficient of 4" in told(undone, N).words


@fixed(60)
@given(sizes.filter(lambda runs: not equal(runs)))
def test_means_over_micro_batches(runs):
    assert told([means(terms, Fraction(N)) for terms in runs], N).causes == (Cause.mean_of_means,)
    assert set(told([means(terms, Fraction(1)) for terms in runs], N).causes) == {Cause.mean_of_means, Cause.loss_not_divided}
    last = [*runs[:-1], runs[-1][:2]]
    assert Cause.short_window_divided_by_n in told([means(terms, Fraction(N)) for terms in last], N).causes


@fixed(60)
@given(sizes, st.sampled_from([0.3, 0.7, 2.5, 10.0]))
def test_a_coefficient_is_no_fault_where_it_was_seen_and_hides_none(runs, c):
    def run(*of_n):
        factor = Fraction(c) * math.prod(Fraction(one.factor) for one in of_n)
        return [
            weighed(t, [factor / sum(t)] * N, [Constant(1 / sum(t), divides=True), Constant(c), *of_n])
            for t in runs
        ]  # fmt: skip

    assert told(run(), N).right
    assert told(run(Constant(1 / N, divides=True)), N).causes == (Cause.loss_divided_twice,)


@pytest.mark.parametrize("shares", [(1, 0, 0, 1), (1, 2, 1, 1), (0.3, 1.2, 0.9, 1.7), (1, -1, 1, 1)])
def test_weights_that_have_no_name_are_told(shares):
    found = told([weighed((5, 5, 5, 5), [Fraction(share) / 20 for share in shares]) for _ in range(3)], N)
    assert not found.right and not found.causes and all(f"{share:.3g}" in found.words for share in shares)
