"""What is seen window by window is merged: each field by its rule, and causes over every wrong window."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.signature import (
    Attribution,
    Errors,
    Movement,
    Samples,
    Signature,
    WrongWindow,
    clearly_nearer,
    explanations,
    worst,
)

BATCH, CLEARED, SHORT = Cause.batch_statistics, Cause.gradients_cleared_in_window, Cause.short_window_divided_by_n


def window(distance: float) -> WrongWindow:
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
def test_merging_is_associative_and_nothing_seen_changes_nothing(a: Signature, b: Signature, c: Signature) -> None:
    assert repr(a.merged(b).merged(c)) == repr(a.merged(b.merged(c)))
    assert repr(a.merged(Signature()).explanations) == repr(Signature().merged(a).explanations) == repr(a.explanations)


def test_each_field_is_merged_by_its_own_rule() -> None:
    a = Signature(
        probes=2, gradient_error=0.1, wrong_windows=({(BATCH,): 0.0},), worst_window=window(1.0), moved=Movement(0.2, -1.0),
        steps_in_window=(2, 4), skipped_windows=1, state_errors={"exp_avg": 0.3}, samples=Samples(repeated=1),
        survivors_error=0.1,
    )  # fmt: skip
    b = Signature(
        probes=3, gradient_error=math.nan, unequal_terms=True, wrong_windows=({(CLEARED,): 0.0},), worst_window=window(2.0),
        moved=Movement(0.1, 1.0), steps_in_window=(1, 8), skipped_windows=2, decays_fit=False, loss_error=0.5,
        state_errors={"exp_avg": 0.1, "ema": 0.2}, samples=Samples(missing=2),
    )  # fmt: skip
    both = a.merged(b)
    assert (both.probes, both.wrong, both.skipped_windows) == (5, 2, 3)
    assert math.isnan(both.gradient_error) and both.loss_error == 0.5
    assert both.unequal_terms and not both.decays_fit
    assert both.worst_window == window(2.0) and both.moved == Movement(0.2, -1.0) and both.steps_in_window == (2, 4)
    assert both.state_errors == {"exp_avg": 0.3, "ema": 0.2}
    assert both.samples == Samples(repeated=1, missing=2) and both.survivors_error == 0.1
    assert both.explanations == {} and both.sufficient_alone == {(BATCH,), (CLEARED,)}


def test_a_cause_must_fit_every_wrong_window() -> None:
    a, b = (CLEARED,), (SHORT,)
    assert explanations([{a: 1e-16, b: 1e-15}, {a: 0.2, b: 1e-14}, {b: 1e-16}]) == {b: 1e-14}
    assert explanations([]) == {}


def test_beside_batch_norm_a_second_cause_may_rest_in_some_windows() -> None:
    seen: list[Errors] = [{(BATCH,): 1e-15}, {(BATCH,): 0.3, (BATCH, SHORT): 1e-14, (SHORT,): 0.2}]
    assert explanations(seen) == {(BATCH,): 0.3, (BATCH, SHORT): 1e-14}


def test_near_the_gate_a_cause_that_changes_nothing_does_not_explain() -> None:
    assert clearly_nearer({(SHORT,): 0.98e-12, (CLEARED,): 1e-16}, 1.02e-12) == {(CLEARED,): 1e-16}
    assert clearly_nearer({(SHORT,): 0.0999, (CLEARED,): 0.1001}, 1.0) == {(SHORT,): 0.0999}


def test_the_longest_movement_keeps_its_direction_and_nan_is_longer_than_any() -> None:
    seen = Signature(moved=Movement(0.2, -1.0)).merged(Signature(moved=Movement(math.nan, 0.5)))
    assert math.isnan(seen.moved.length) and seen.moved.along_weights == 0.5


def test_the_stored_form_is_json_with_causes_joined() -> None:
    row = json.loads(json.dumps(Signature(probes=1, wrong_windows=({(BATCH, SHORT): 0.5, (BATCH,): 1e-15},)).stored()))
    assert row["explanations"] == {"batch_statistics": 1e-15, "batch_statistics+short_window_divided_by_n": 1e-15}
    assert row["wrong"] == 1 and row["sufficient_alone"] == ["batch_statistics"]


def test_a_failed_measure_is_the_worst() -> None:
    assert math.isnan(worst(1.0, math.nan)) and math.isnan(worst(math.nan, 1.0))
    assert worst(1.0, 3.0, 2.0) == 3.0
