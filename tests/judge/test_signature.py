"""What is seen window by window is merged: each field by its rule, and causes over every wrong window."""

import math

from hypothesis import given
from hypothesis import strategies as st

from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.signature import (
    Attribution,
    Movement,
    Samples,
    Signature,
    WrongWindow,
    explanations,
)

BATCH, CLEARED, SHORT = Cause.batch_statistics, Cause.gradients_cleared_in_window, Cause.short_window_divided_by_n


def window(distance):
    whole = Attribution(distance=distance, scale=1.0, cosine=1.0, weights=(), residual=0.0, condition=1.0)
    return WrongWindow(step=0, samples=8, micro_batches=2, clip_norm=None, whole=whole, groups={}, tensors={})


ERROR = st.floats(0, 10) | st.just(math.nan)
COUNT = st.integers(0, 4)
SIGNATURES = st.builds(
    Signature,
    probes=COUNT, gradient_error=ERROR, unequal_terms=st.booleans(),
    wrong_windows=st.lists(st.dictionaries(st.sampled_from([(BATCH,), (BATCH, SHORT), (CLEARED,)]), st.floats(0, 1))).map(tuple),
    worst_window=st.none() | st.floats(1, 2).map(window), moved=st.builds(Movement, ERROR, st.floats(-1, 1)),
    steps_in_window=st.tuples(COUNT, COUNT), skipped_windows=COUNT, decays_fit=st.booleans(),
    state_errors=st.dictionaries(st.sampled_from(["exp_avg", "ema"]), ERROR), advanced_error=ERROR, loss_error=ERROR,
    samples=st.builds(Samples, repeated=COUNT, missing=COUNT),
)  # fmt: skip


@given(SIGNATURES, SIGNATURES, SIGNATURES)
def test_merging_is_associative_and_nothing_seen_changes_nothing(a, b, c):
    assert repr(a.merged(b).merged(c)) == repr(a.merged(b.merged(c)))
    assert repr(a.merged(Signature()).explanations) == repr(Signature().merged(a).explanations) == repr(a.explanations)


def test_a_cause_must_fit_every_wrong_window():
    a, b = (CLEARED,), (SHORT,)
    assert explanations([{a: 1e-16, b: 1e-15}, {a: 0.2, b: 1e-14}, {b: 1e-16}]) == {b: 1e-14}
    assert explanations([]) == {}
