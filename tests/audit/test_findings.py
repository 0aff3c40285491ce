"""The rules alone, on plain numbers: each speaks when its prediction fits, and only then."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from harness.audit.compare.facts import OneTerm, RowFacts, RunFacts, StepFacts, TermFacts
from harness.audit.rules.findings import explain
from harness.audit.rules.gradient_rules import explain_step

GATE = 1e-6
EQUAL = StepFacts(
    accumulation_steps=4,
    track="SGD",
    step=0,
    gate=GATE,
    distance=0.0,
    scale=1.0,
    cosine=1.0,
    raw_distance=0.0,
    raw_scale=1.0,
    raw_cosine=1.0,
    clipped=False,
    backwards=4,
    reference_backwards=1,
    rows="same",
)
OFF = replace(EQUAL, distance=0.5, raw_distance=0.5)
RUN = RunFacts(
    accumulation_steps=4,
    track="SGD",
    steps=3,
    reference_steps=3,
    idle_steps=0,
    reference_idle_steps=0,
    backwards=(4, 4, 4),
    reference_backwards=(1, 1, 1),
    pending=0,
    windows=("same",) * 3,
    repeated=(0, 0, 0),
    never=0,
    foreign=0,
    lrs=((0.1,),) * 3,
    reference_lrs=((0.1,),) * 3,
    schedule_calls=(1, 1, 1),
    reference_schedule_calls=(1, 1, 1),
    lr_moves_inside=False,
    state_steps=(1.0, 2.0, 3.0),
    reference_state_steps=(1.0, 2.0, 3.0),
)

STEPS: list[tuple[str, dict[str, Any], str]] = [
    ("sum of losses", {"fits": {"N": 1e-8}}, "loss_not_divided"),
    ("one N too many", {"fits": {"1/N": 1e-8}}, "loss_divided_twice"),
    ("short window", {"backwards": 2, "fits": {"K/N": 1e-8}}, "short_window_divided_by_n"),
    ("other weights", {"fits": {"span": 1e-8, "plain_sum": 1e-8}, "weights": (0.5, 1.5), "condition": 2.0}, "mean_of_means"),
    ("cleared", {"cleared_inside": 3, "fits": {"since_clear": 1e-8}}, "gradients_cleared_in_window"),
    ("first kept", {"fits": {"first": 1e-8, "sum*1": 1e-8}}, "accumulator_overwritten"),
    ("stale", {"stale": True, "fits": {"stale": 1e-8}}, "gradients_not_cleared"),
    ("16 bits", {"low_precision": "bfloat16", "fits": {"sum*1": 1e-8, "own_sum": 1e-3}}, "low_precision_accumulator"),
    ("clipped inside", {"active_clips_inside": 3, "fits": {"sum*1": 1e-8}}, "clip_per_micro_batch"),
    ("scale moves", {"loss_scales": 2}, "scaler_updated_in_window"),
    ("coupled", {"coupled": True, "fits": {"span": 0.3}}, "non_separable_loss"),
    ("drawn inside", {"draws": True, "fits": {"span": 0.3}}, "stochastic_layers"),
    ("on all ranks", {"ranks": 2, "fits": {"W": 1e-8}}, "replica_scale"),
    ("somebody else's", {"fits": {"without_foreign": 1e-8}}, "foreign_gradients"),
    ("found", {"found_changed": True, "fits": {"sum*1": 1e-8}}, "foreign_gradients"),
    ("unscaled inside", {"unscaled_inside": 3, "fits": {"sums": 1e-8}}, "scaler_updated_in_window"),
    ("noise after each", {"drawn_between": True, "fits": {"sums": 1e-8}}, "stochastic_layers"),
    ("one norm", {"rescaled": (0.1, 0.1), "fits": {"sums": 1e-8}}, "clip_per_micro_batch"),
    ("rows added", {"num_rows": 16, "fits": {"R": 1e-8}}, "loss_not_divided"),
    ("terms miscounted", {"same_at_one": True, "fits": {"line": 1e-8}}, "counter_wrong"),
]


@pytest.mark.parametrize(("changes", "cause"), [case[1:] for case in STEPS], ids=[case[0] for case in STEPS])
def test_a_rule_speaks_when_its_prediction_fits_and_only_then(changes: dict[str, Any], cause: str) -> None:
    assert [f.cause for f in explain_step(replace(OFF, **changes))] == [cause]
    far = {**changes, "fits": {name: 0.2 for name in changes.get("fits", {})}}
    if "fits" in changes and "span" not in changes["fits"]:
        assert cause not in [f.cause for f in explain_step(replace(OFF, **far))]
    if cause != "gradients_not_cleared":  # carried gradients are wrong at every N alike
        assert explain_step(replace(EQUAL, **changes)) == []


def test_underflow_needs_float16_and_lost_elements() -> None:
    lost: dict[str, Any] = {"lost": 0.2, "float16": True}
    assert [f.cause for f in explain_step(replace(OFF, **lost))] == ["underflow_from_division"]
    assert [f.cause for f in explain_step(replace(EQUAL, **lost))] == ["underflow_from_division"]  # also below a coarse gate
    assert [f.cause for f in explain_step(replace(OFF, **(lost | {"float16": False})))] == ["unexplained"]
    assert explain_step(replace(EQUAL, **(lost | {"lost": 0.01}))) == []


@pytest.mark.parametrize(
    ("weights", "causes"),
    [
        (((0.5, 1.5), (0.5, 1.5)), ["replica_scale"]),
        (((0.5, 0.5), (1.5, 1.5)), ["mean_of_means"]),
        (((0.3, 1.2), (0.6, 1.9)), ["replica_scale", "mean_of_means"]),
        (((1.0, 1.0), (1.0, 1.0)), ["unexplained"]),
    ],
)
def test_weights_of_ranks_and_of_their_micro_batches_are_told_apart(weights: Any, causes: list[str]) -> None:
    facts = replace(OFF, ranks=2, rank_weights=weights, rank_residual=1e-8, rank_condition=2.0)
    assert [f.cause for f in explain_step(facts)] == causes
    assert [f.cause for f in explain_step(replace(facts, rank_residual=0.1))] == ["unexplained"]


def test_rows_tell_a_split_dependent_normaliser() -> None:
    rows = RowFacts(outputs=0.0, residual=1e-7, factors=((1.0, 0.5), (2.0, 1.5)))
    facts = replace(OFF, fits={"span": 0.3}, by_row=rows, probed=True)
    assert [f.cause for f in explain_step(facts)] == ["normaliser_depends_on_split"]
    assert [f.cause for f in explain_step(replace(facts, same_at_one=True))] == ["mean_of_means"]
    other: list[dict[str, Any]] = [{"outputs": 0.1}, {"residual": 0.1}, {"factors": ((0.5, 0.5), (2.0, 2.0))}]
    for changes in other:
        assert [f.cause for f in explain_step(replace(facts, by_row=replace(rows, **changes)))] == ["unexplained"]
    coarse = replace(facts, roundoff=2.0**-8, by_row=replace(rows, factors=((1.0, 1.1),)))
    assert [f.cause for f in explain_step(coarse)] == ["unexplained"]


def test_what_is_gone_while_weights_stay_is_a_stale_cache() -> None:
    assert [f.cause for f in explain_step(replace(OFF, fits={"span": 0.3}, held=True))] == ["cached_weights_stale"]


def test_what_no_rule_fits_is_unexplained_with_evidence() -> None:
    (finding,) = explain_step(replace(OFF, fits={"N": 0.3, "span": 0.4}))
    assert finding.cause == "unexplained" and finding.evidence["residual"] == 0.4 and finding.evidence["distance"] == 0.5


def test_weights_of_collinear_micro_batches_mean_nothing() -> None:
    facts = replace(OFF, fits={"span": 1e-8, "plain_sum": 1e-8}, weights=(0.5, 1.5), condition=1e9)
    assert [f.cause for f in explain_step(facts)] == ["unexplained"]


def test_a_multiple_of_the_right_gradient_is_no_mean_of_means() -> None:
    fits = {"span": 1e-8, "plain_sum": 1e-8}
    facts = replace(OFF, fits=fits, weights=(0.6, 0.6, 0.7, 0.6), condition=2.0)
    assert [f.cause for f in explain_step(facts)] == ["mean_of_means"]
    (finding,) = explain_step(replace(facts, fits=fits | {"line": 1e-8}, weights=(0.6,) * 4, raw_scale=1.6))
    assert finding.cause == "unexplained" and "1.6" in finding.message


def test_a_scale_that_grows_is_told_from_unequal_terms() -> None:
    facts = replace(OFF, fits={"span": 1e-8, "plain_sum": 1e-8}, weights=(8.0, 4.0, 2.0, 1.0), condition=2.0)
    assert [f.cause for f in explain_step(facts)] == ["scaler_updated_in_window"]
    for weights in ((8.0, 4.0, 2.1, 1.0), (4.0, 2.0, 1.0)):  # numbers of terms; too few to tell
        assert [f.cause for f in explain_step(replace(facts, weights=weights))] == ["mean_of_means"]
    short = replace(facts, step=1, backwards=2, weights=(2.0, 1.0))
    assert [f.cause for f in explain(RUN, [facts, short])] == ["scaler_updated_in_window"]  # the full window tells
    assert "mean_of_means" in [f.cause for f in explain(RUN, [facts, replace(short, weights=(3.0, 1.0))])]


def test_copies_that_nothing_updates_are_no_averages() -> None:
    steps = [replace(EQUAL, step=t) for t in range(3)]
    kept = replace(RUN, shadow_distances=((1, 0.5, 1e-3),), shadow_updates=(0, 0, 0), reference_shadow_updates=(0, 0, 0))
    assert explain(kept, steps) == []
    assert [f.cause for f in explain(replace(kept, shadow_updates=(4, 4, 4)), steps)] == ["ema_per_micro_batch"]
    as_often = replace(kept, shadow_updates=(1, 1, 1), reference_shadow_updates=(1, 1, 1))
    assert [f.cause for f in explain(as_often, steps)] == ["unexplained"]
    assert [f.cause for f in explain(replace(as_often, shadow_moves_inside=True), steps)] == ["ema_per_micro_batch"]


def test_other_outputs_for_the_same_rows_are_batch_statistics() -> None:
    rows = RowFacts(outputs=0.1, residual=0.1, factors=((1.0,), (1.0,)))
    facts = replace(OFF, fits={"span": 0.3}, by_row=rows, mixed=True, probed=True)
    assert [f.cause for f in explain_step(facts)] == ["batch_statistics"]
    assert [f.cause for f in explain_step(replace(facts, mixed=False, buffers=("mean",)))] == ["batch_statistics"]
    other: list[dict[str, Any]] = [{"mixed": False}, {"by_row": replace(rows, outputs=0.0)}, {"rows": "different"}]
    for changes in other:
        assert [f.cause for f in explain_step(replace(facts, **changes))] == ["unexplained"]


def test_buffers_speak_only_when_nothing_else_does() -> None:
    steps = [EQUAL, replace(EQUAL, step=1, buffers=("mean",)), replace(EQUAL, step=2)]
    (finding,) = explain(RUN, steps)
    assert finding.cause == "batch_statistics" and finding.optimizer_step == 1 and "mean" in finding.message
    assert [f.cause for f in explain(replace(RUN, state_steps=(4.0, 8.0, 12.0)), steps)] == ["optimizer_state_per_micro_batch"]


def test_a_term_that_reaches_some_tensors_is_not_named_near_the_gate() -> None:
    facts = replace(OFF, fits={"span": 0.3}, partly=("weight",), probed=True)
    assert [f.cause for f in explain_step(facts)] == ["auxiliary_loss_scale"]
    assert [f.cause for f in explain_step(replace(facts, gate=0.2))] == ["unexplained"]


RUNS: list[tuple[str, dict[str, Any], str]] = [
    ("tail dropped", {"steps": 2}, "window_misplaced"),
    ("steps inside", {"steps": 12, "backwards": (1,) * 12}, "step_every_micro_batch"),
    ("state inside", {"idle_steps": 9}, "optimizer_state_per_micro_batch"),
    ("counter", {"state_steps": (4.0, 8.0, 12.0)}, "optimizer_state_per_micro_batch"),
    ("schedule", {"lrs": ((0.1,), (0.06,), (0.03,)), "schedule_calls": (4, 4, 4)}, "schedule_per_micro_batch"),
    ("laid out", {"lrs": ((0.1,), (0.11,), (0.13,)), "horizon": 25.0, "reference_horizon": 7.0}, "schedule_per_micro_batch"),
    ("another length", {"lrs": ((0.1,), (0.11,), (0.13,)), "horizon": 14.0, "reference_horizon": 7.0}, "unexplained"),
    ("rates", {"lrs": ((0.1,), (0.2,), (0.3,))}, "unexplained"),
    ("average", {"shadow_distances": ((1, 0.5, 1e-3),), "shadow_updates": (4, 4, 4)}, "ema_per_micro_batch"),
    ("statistics", {"norm_updates": (4, 8, 12), "reference_norm_updates": (1, 2, 3)}, "batch_statistics"),
    ("counts", {"counts": {"samples": 48.0}, "reference_counts": {"samples": 12.0}}, "counter_wrong"),
    ("report", {"reported": (1.0, 2.0, 3.0), "reference_reported": (1.0, 2.0, 12.0)}, "loss_report_differs"),
]


@pytest.mark.parametrize(("changes", "cause"), [case[1:] for case in RUNS], ids=[case[0] for case in RUNS])
def test_counters_speak_when_gradients_agree(changes: dict[str, Any], cause: str) -> None:
    steps = [replace(EQUAL, step=t) for t in range(3)]
    assert explain(RUN, steps) == []
    assert [f.cause for f in explain(replace(RUN, **changes), steps)] == [cause]


def test_a_resumed_window_speaks_when_gradients_are_lost() -> None:
    run = replace(RUN, resumed=((1, 2),))
    assert explain(run, [replace(EQUAL, step=t) for t in range(3)]) == []  # the window was begun again
    found = explain(run, [EQUAL, replace(OFF, step=1), replace(EQUAL, step=2)])
    assert [(f.cause, f.optimizer_step) for f in found] == [("resume_in_window", 1)]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"cleared_at_last": ("weight",)}, "gradients_cleared_in_window"),
        ({"cleared_inside": 3, "cleared_then_filled": True}, "accumulator_overwritten"),
        ({"cleared_inside": 1, "loaded_inside": True}, "resume_in_window"),
    ],
)
def test_gradients_that_are_lost_are_told_apart(changes: dict[str, Any], cause: str) -> None:
    facts = replace(OFF, fits={"since_clear": 1e-8}, **changes)
    assert [f.cause for f in explain_step(facts)] == [cause]
    assert [f.cause for f in explain_step(replace(facts, fits={"since_clear": 0.2}))] == ["unexplained"]
    assert explain_step(replace(EQUAL, **changes)) == []


def test_rows_decide_only_where_gradients_differ() -> None:
    wrong = replace(RUN, windows=("same", "different", "different"))
    assert explain(wrong, [replace(EQUAL, step=t) for t in range(3)]) == []
    found = explain(wrong, [EQUAL, replace(OFF, step=1), replace(OFF, step=2)])
    assert [(f.cause, f.optimizer_step) for f in found] == [("window_misplaced", 1)]
    found = explain(replace(wrong, repeated=(0, 8, 8)), [EQUAL, replace(OFF, step=1), replace(OFF, step=2)])
    assert [f.cause for f in found] == ["samples_repeated"]


def test_one_finding_per_cause_lists_its_steps() -> None:
    (finding,) = explain(RUN, [replace(OFF, step=t, fits={"N": 1e-8}) for t in range(3)])
    assert finding.optimizer_step == 0 and finding.evidence["steps"] == [0, 1, 2]


def test_a_number_that_failed_never_passes() -> None:
    assert not replace(EQUAL, raw_distance=math.nan).gradients_agree
    assert [f.cause for f in explain_step(replace(EQUAL, distance=math.nan))] == ["unexplained"]


def test_a_term_of_the_loss_that_counts_otherwise_is_an_auxiliary_loss() -> None:
    terms = TermFacts(weights=(1.0, 0.25), residual=1e-8, condition=2.0)
    facts = replace(OFF, fits={"span": 0.3}, by_term=terms, probed=True)
    (finding,) = explain_step(facts)
    assert finding.cause == "auxiliary_loss_scale" and "term 2 of 2 counts 4 times" in finding.message
    other: list[dict[str, Any]] = [{"residual": 0.1}, {"weights": (0.25, 0.25)}, {"weights": (1.0, -0.25)}, {"condition": 1e9}]
    for changes in other:
        assert [f.cause for f in explain_step(replace(facts, by_term=replace(terms, **changes)))] == ["unexplained"]
    assert explain_step(replace(EQUAL, by_term=terms)) == []


@pytest.mark.parametrize(
    ("term", "causes"),
    [
        ({"weights": (1.2, 0.8)}, ["mean_of_means"]),
        ({"weights": (0.3, 0.2)}, ["mean_of_means", "auxiliary_loss_scale"]),  # of 4 micro-batches: added as well
        ({"weights": (0.25, 0.25)}, ["auxiliary_loss_scale"]),
        ({"residual": 0.1, "scale": 1.1}, ["non_separable_loss"]),
        ({"residual": 0.1, "scale": 3.7}, ["non_separable_loss", "auxiliary_loss_scale"]),
        ({"residual": 0.1, "off_rows": 1e-5}, ["normaliser_depends_on_split"]),  # each row's slope points as it should
        ({"residual": 0.1, "off_rows": 0.1}, ["non_separable_loss"]),
        ({"weights": (1.2, -0.8)}, ["unexplained"]),
        ({"condition": 1e9}, ["unexplained"]),
    ],
)
def test_each_term_of_the_loss_is_judged_by_itself(term: dict[str, Any], causes: list[str]) -> None:
    right = OneTerm(distance=1e-8, scale=1.0, weights=(1.0, 1.0), residual=1e-8, condition=2.0)
    wrong = replace(right, distance=0.3, **term)
    terms = TermFacts(weights=(1.0, 0.9), residual=0.1, condition=2.0, each=(right, wrong))
    facts = replace(OFF, fits={"span": 0.3}, by_term=terms, probed=True)
    assert facts.accumulation_steps == 4 and [f.cause for f in explain_step(facts)] == causes
    for each in ((right, right), (wrong, wrong), ()):  # none or all are wrong: nothing shows that the forwards agree
        assert [f.cause for f in explain_step(replace(facts, by_term=replace(terms, each=each)))] == ["unexplained"]


@pytest.mark.parametrize(
    ("weights", "causes"),
    [
        ((1.0, 0.25) * 4, ["auxiliary_loss_scale"]),
        ((1.0, 0.25, 1.2, 0.25, 0.8, 0.25, 1.0, 0.25), ["mean_of_means"]),  # the first loss is weighted wrongly by itself
    ],
)
def test_two_backwards_per_micro_batch_are_weighed_by_loss(weights: tuple[float, ...], causes: list[str]) -> None:
    fits = {"span": 1e-8, "plain_sum": 1e-8}
    facts = replace(OFF, backwards=8, reference_backwards=2, fits=fits, weights=weights, condition=2.0)
    assert [f.cause for f in explain_step(facts)] == causes
    assert [f.cause for f in explain_step(replace(facts, reference_backwards=1))] == ["mean_of_means"]
