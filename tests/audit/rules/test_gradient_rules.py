"""The rules of one optimizer step alone, on plain numbers: each speaks when its prediction fits, and only then."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from accumulation_harness.audit.compare.facts import OneTerm, RowFacts, StepFacts, TermFacts, WeightedSum
from accumulation_harness.audit.rules.gradient_rules import ROUNDOFF, explain_step
from accumulation_harness.judge.cause import Cause
from tests.audit.rules.cases import AT_EVERY_N, EQUAL, GATE, OFF, ROWS, STEPS, changed


def causes(facts: StepFacts) -> list[str]:
    return [f.cause for f in explain_step(facts)]


@pytest.mark.parametrize(("name", "changes", "cause"), STEPS, ids=[case[0] for case in STEPS])
def test_a_rule_speaks_when_its_prediction_fits_and_only_then(name: str, changes: dict[str, Any], cause: Cause) -> None:
    assert causes(changed(OFF, **changes)) == [cause]
    if name not in AT_EVERY_N:
        assert causes(changed(EQUAL, **changes)) == []
    known = {
        "own_sum": ROUNDOFF["bfloat16"] * 5 if "precision" in changes else GATE,
        "along_weights": 2 * GATE,
        "along_signs": 2 * GATE,
    }  # of a difference of half of g
    for factor in (0.99, 1.01) if cause is not Cause.unexplained and "fits" in changes else ():
        at_gate = {fit: factor * known.get(fit, GATE) for fit in changes["fits"]}
        assert (cause in causes(changed(OFF, **(changes | {"fits": at_gate})))) == (factor < 1)


def test_what_is_wrong_at_every_n_is_told_where_gradients_agree() -> None:
    for changes in ({"scaling": {"clips_scaled": True}}, {"accumulator": {"stale": True}}, {"window": {"moves": 4}}):
        assert len(causes(changed(EQUAL, **changes))) == 1
    assert causes(changed(EQUAL, window={"moves": 4, "reference_moves": 4})) == []


def test_parameters_that_go_further_inside_the_window_are_told() -> None:
    further: dict[str, Any] = {"moves": 1, "reference_moves": 1, "moved_apart": 1e-3, "apart_along_weights": -1.0}
    assert causes(changed(EQUAL, window=further)) == ["weight_decay_per_micro_batch"]
    assert causes(changed(EQUAL, window=further | {"apart_along_weights": 1.0})) == ["unexplained"]
    assert causes(changed(EQUAL, window=further, precision={"roundoff": 1e-4})) == []
    assert causes(changed(OFF, window=further, fits={"times_n": 1e-8})) == ["loss_not_divided"]  # a consequence


def test_what_is_added_is_judged_beside_what_becomes_of_it() -> None:
    """Gradients that are cleared, and no multiple of what they should add up to."""
    cleared: dict[str, Any] = {"accumulator": {"cleared_inside": 3}, "fits": {"since_clear": 1e-8, "sums_line": 0.2}}
    weighed = changed(OFF, **cleared, parts={"residual": 1e-8, "weights": (0.5, 1.5, 0.8, 1.2), "condition": 2.0})
    assert causes(weighed) == ["gradients_cleared_in_window", "mean_of_means"]
    assert causes(changed(weighed, parts={"residual": 0.1})) == ["gradients_cleared_in_window", "unexplained"]
    for sums_line in (1e-8, math.inf):
        assert causes(changed(weighed, fits={"sums_line": sums_line})) == ["gradients_cleared_in_window"]


def test_a_clip_inside_is_one_where_the_sum_is_wrong_besides() -> None:
    seen: dict[str, Any] = {"scaling": {"clips_inside": 3}, "fits": {"own_sum": 0.4}}
    assert causes(changed(OFF, **seen)) == ["clip_per_micro_batch"]
    assert causes(changed(OFF, **seen | {"fits": {"own_sum": 1e-8}})) == ["unexplained"]
    assert causes(changed(OFF, **seen | {"scaling": {"clips_inside": 3, "reference_clips_inside": 3}})) == ["unexplained"]


def test_micro_batches_without_terms_have_their_share_of_a_mean() -> None:
    some = changed(OFF, window={"without_terms": 1}, raw={"scale": 0.75}, fits={"line": 1e-8})
    assert causes(some) == ["mean_of_means"]
    assert causes(changed(some, raw={"scale": 3.0})) == ["mean_of_means", "loss_not_divided"]
    assert causes(changed(some, raw={"scale": 0.7071})) == ["unexplained"]


def test_underflow_needs_float16_and_lost_elements() -> None:
    lost: dict[str, Any] = {"lost": 0.2, "float16": True}
    assert causes(changed(OFF, precision=lost)) == ["underflow_from_division"]
    assert causes(changed(EQUAL, precision=lost)) == ["underflow_from_division"]  # also below a coarse gate
    assert causes(changed(OFF, precision=lost | {"float16": False})) == ["unexplained"]
    assert causes(changed(EQUAL, precision=lost | {"lost": 0.01})) == []


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (((0.5, 1.5), (0.5, 1.5)), ["replica_scale"]),
        (((0.5, 0.5), (1.5, 1.5)), ["mean_of_means"]),
        (((0.3, 1.2), (0.6, 1.9)), ["replica_scale", "mean_of_means"]),
        (((1.0, 1.0), (1.0, 1.0)), ["unexplained"]),
    ],
)
def test_weights_of_ranks_and_of_their_micro_batches_are_told_apart(weights: Any, expected: list[str]) -> None:
    facts = changed(OFF, ranks=2, by_rank={"weights": weights, "residual": 1e-8, "condition": 2.0})
    assert causes(facts) == expected
    assert causes(changed(facts, by_rank={"residual": 0.1})) == ["unexplained"]


def test_rows_tell_a_split_dependent_normaliser() -> None:
    facts = changed(OFF, parts={"residual": 0.3}, probe={"by_row": ROWS, "made": True})
    assert causes(facts) == ["normaliser_depends_on_split"]
    assert causes(changed(facts, probe={"same_at_one": True})) == ["mean_of_means"]
    other: list[dict[str, Any]] = [{"outputs": 0.1}, {"residual": 0.1}, {"factors": ((0.5, 0.5), (2.0, 2.0))}]
    for changes in other:
        assert causes(changed(facts, probe={"by_row": replace(ROWS, **changes)})) == ["unexplained"]
    coarse = changed(facts, precision={"roundoff": 2.0**-8}, probe={"by_row": replace(ROWS, factors=((1.0, 1.1),))})
    assert causes(coarse) == ["unexplained"]


def test_what_no_rule_fits_is_unexplained_with_evidence() -> None:
    (finding,) = explain_step(changed(OFF, fits={"times_n": 0.3}, parts={"residual": 0.4}))
    assert finding.cause == "unexplained" and finding.evidence["residual"] == 0.4 and finding.evidence["distance"] == 0.5
    assert finding.kind == "gradient" and finding.unreproduced


WEIGHTED: dict[str, Any] = {
    "fits": {"sum_line": 1e-8},
    "parts": {"residual": 1e-8, "weights": (0.5, 1.5, 0.8, 1.2), "condition": 2.0},
}


def test_a_multiple_of_the_right_gradient_is_no_mean_of_means() -> None:
    facts = changed(changed(OFF, **WEIGHTED), parts={"weights": (0.96, 0.96, 1.12, 0.96)})
    assert causes(facts) == ["mean_of_means"]
    on_line = changed(facts, fits={"line": 1e-8}, parts={"weights": (0.6,) * 4})
    (finding,) = explain_step(changed(on_line, raw={"scale": 1.6180339}))
    assert finding.cause == "unexplained" and "1.618" in finding.message
    (finding,) = explain_step(changed(on_line, raw={"scale": 1.625 * (1 + 0.9e-7)}))
    assert finding.cause == "counter_wrong" and "13/8" in finding.message
    assert causes(changed(on_line, raw={"scale": 1.625 * (1 + 1.1e-7)})) == ["unexplained"]


def test_weights_that_are_no_shares_of_loss_terms_are_no_mean_of_means() -> None:
    weights = (0.25, 0.5, 0.75, 1.0)  # each loss divided by its place in the window
    (finding,) = explain_step(changed(changed(OFF, **WEIGHTED), parts={"weights": weights}))
    assert finding.cause == "unexplained" and "0.25, 0.5, 0.75, 1" in finding.message
    by_rows = {"rows_each": (4, 4, 4, 2), "num_rows": 14}  # their rows make them shares, w_k r_k adding up to the window's rows
    facts = changed(changed(OFF, **WEIGHTED), window=by_rows, parts={"weights": (1.0, 0.5, 1.5, 1.0)})
    assert causes(facts) == ["mean_of_means"]
    assert causes(changed(facts, parts={"weights": (1.1, 0.5, 1.5, 1.0)})) == ["unexplained"]


def test_weights_that_are_rounding_are_none() -> None:
    facts = changed(OFF, **WEIGHTED)
    for smallest, expected in ((2.1e-7, "mean_of_means"), (1.9e-7, "unexplained")):  # 10 times residual times condition
        weights = (smallest, smallest, smallest, 4.0)
        assert causes(changed(facts, parts={"weights": weights})) == [expected]


def test_a_scale_that_grows_is_told_from_unequal_terms() -> None:
    facts = changed(changed(OFF, **WEIGHTED), parts={"weights": (8.0, 4.0, 2.0, 1.0)})
    assert causes(facts) == ["scaler_updated_in_window"]
    for weights in ((8.0, 4.0, 2.1, 1.0), (4.0, 2.0, 1.0)):  # numbers of terms; too few to tell
        shares = tuple(w * len(weights) / sum(weights) for w in weights)
        said = causes(changed(facts, window={"backwards": len(weights)}, parts={"weights": shares}))
        assert said == ["mean_of_means"]


def test_other_outputs_for_the_same_rows_are_batch_statistics_or_state_of_the_forward() -> None:
    rows = RowFacts(outputs=0.1, residual=0.1, factors=((1.0,), (1.0,)))
    facts = changed(OFF, parts={"residual": 0.3}, probe={"by_row": rows, "mixed": True, "made": True})
    assert causes(facts) == ["batch_statistics"]
    assert causes(changed(facts, probe={"mixed": False}, layers={"buffers": ("mean",)})) == ["stateful_forward"]
    other: list[dict[str, Any]] = [
        {"probe": {"mixed": False}},
        {"probe": {"by_row": replace(rows, outputs=0.0)}},
        {"window": {"rows": "different"}},
    ]
    for changes in other:
        assert causes(changed(facts, **changes)) == ["unexplained"]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"cleared_at_last": ("weight",)}, "gradients_cleared_in_window"),
        ({"cleared_inside": 3, "cleared_then_filled": True}, "accumulator_overwritten"),
        ({"cleared_inside": 1, "loaded_inside": True}, "resume_in_window"),
    ],
)
def test_gradients_that_are_lost_are_told_apart(changes: dict[str, Any], cause: str) -> None:
    facts = changed(OFF, fits={"since_clear": 1e-8}, accumulator=changes)
    assert causes(facts) == [cause]
    assert causes(changed(facts, fits={"since_clear": 0.2})) == ["unexplained"]
    assert causes(changed(EQUAL, accumulator=changes)) == []


def test_a_number_that_failed_never_passes() -> None:
    assert not changed(EQUAL, raw={"distance": math.nan}).gradients_agree
    assert causes(changed(EQUAL, consumed={"distance": math.nan})) == ["unexplained"]


def test_a_term_of_the_loss_that_counts_otherwise_is_an_auxiliary_loss() -> None:
    parts = WeightedSum(weights=(1.0, 0.25), residual=1e-8, condition=2.0)
    terms = TermFacts(parts=parts)
    facts = changed(OFF, parts={"residual": 0.3}, probe={"by_term": terms, "made": True})
    (finding,) = explain_step(facts)
    assert finding.cause == "auxiliary_loss_scale" and "term 2 of 2 counts 4 times" in finding.message
    other: list[dict[str, Any]] = [{"residual": 0.1}, {"weights": (0.25, 0.25)}, {"weights": (1.0, -0.25)}, {"condition": 1e9}]
    for changes in other:
        assert causes(changed(facts, probe={"by_term": TermFacts(parts=replace(parts, **changes))})) == ["unexplained"]
    assert explain_step(changed(EQUAL, probe={"by_term": terms})) == []


def test_the_terms_of_one_backward_for_all_micro_batches_are_these() -> None:
    terms = TermFacts(parts=WeightedSum(weights=(0.5, 1.5, 1.0, 1.0), residual=1e-8, condition=2.0))
    window: dict[str, Any] = {"backwards": 1, "forwards": 4, "reference_forwards": 1}
    facts = changed(OFF, parts={"residual": 0.3}, probe={"by_term": terms, "made": True}, window=window)
    assert causes(facts) == ["mean_of_means"]
    for other in ({"forwards": 1}, {"forwards": 3}, {"reference_forwards": 4}, {"backwards": 4}):
        assert causes(changed(facts, window=other)) == ["auxiliary_loss_scale"]


@pytest.mark.parametrize(
    ("parts", "term", "expected"),
    [
        ({"weights": (1.2, 0.8, 1.1, 0.9)}, {}, ["mean_of_means"]),
        ({"weights": (0.3, 0.2, 0.28, 0.22)}, {}, ["mean_of_means", "auxiliary_loss_scale"]),  # added as well
        ({"weights": (0.25,) * 4}, {}, ["auxiliary_loss_scale"]),
        ({"weights": (2.0, 2.0)}, {}, ["mean_of_means"]),  # two of the four micro-batches have nothing of the term
        ({"weights": (0.5, 0.5)}, {}, ["auxiliary_loss_scale"]),
        ({"weights": (1.0, 0.5, 0.4, 0.3)}, {}, ["unexplained"]),  # annealed from one to the next
        ({"residual": 0.1}, {"scale": 1.1}, ["non_separable_loss"]),
        ({"residual": 0.1}, {"scale": 3.7}, ["non_separable_loss", "auxiliary_loss_scale"]),
        (
            {"residual": 0.1},
            {"by_row": RowFacts(residual=1e-5, factors=((1.0,),))},
            ["normaliser_depends_on_split"],
        ),  # each row's slope points as it should
        ({"residual": 0.1}, {"by_row": RowFacts(residual=0.1, factors=((1.0,),))}, ["non_separable_loss"]),
        ({"weights": (1.2, -0.8)}, {}, ["unexplained"]),
        ({"condition": 1e9}, {}, ["unexplained"]),
    ],
)
def test_each_term_of_the_loss_is_judged_by_itself(parts: dict[str, Any], term: dict[str, Any], expected: list[str]) -> None:
    whole = WeightedSum(weights=(1.0, 1.0), residual=1e-8, condition=2.0)
    right = OneTerm(distance=1e-8, scale=1.0, parts=whole, micro_batches=4)
    wrong = replace(right, distance=0.3, parts=replace(whole, **parts), **term)
    terms = TermFacts(parts=WeightedSum(weights=(1.0, 0.9), residual=0.1, condition=2.0), each=(right, wrong))
    facts = changed(OFF, parts={"residual": 0.3}, probe={"by_term": terms, "made": True})
    assert facts.accumulation_steps == 4 and causes(facts) == expected
    for each in ((right, right), (wrong, wrong), ()):  # none or all are wrong: nothing shows that the forwards agree
        assert causes(changed(facts, probe={"by_term": replace(terms, each=each)})) == ["unexplained"]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1.0, 0.25) * 4, ["auxiliary_loss_scale"]),
        ((1.0, 0.25, 1.2, 0.25, 0.8, 0.25, 1.0, 0.25), ["mean_of_means"]),  # the first loss is weighted wrongly by itself
    ],
)
def test_two_backwards_per_micro_batch_are_weighed_by_loss(weights: tuple[float, ...], expected: list[str]) -> None:
    facts = changed(changed(OFF, **WEIGHTED), window={"backwards": 8, "reference_backwards": 2}, parts={"weights": weights})
    assert causes(facts) == expected
    assert causes(changed(facts, window={"reference_backwards": 1})) == ["unexplained"]


@pytest.mark.parametrize(
    ("weights", "besides"),
    [
        ((0.2, 0.3, 0.1, 0.4), ["loss_not_divided"]),
        ((2.0, 6.0, 3.0, 5.0), ["loss_divided_twice"]),
        ((1.0, 3.0), ["short_window_divided_by_n"]),
        ((0.52, 0.48), ["loss_not_divided"]),  # two of four micro-batches, whose means are added
        ((0.5, 1.5, 0.8, 1.2), []),
    ],
)
def test_unequal_weights_may_have_a_wrong_mean_besides(weights: tuple[float, ...], besides: list[str]) -> None:
    facts = changed(changed(OFF, **WEIGHTED), window={"backwards": len(weights)}, parts={"weights": weights})
    assert causes(facts) == ["mean_of_means", *besides]


@pytest.mark.parametrize(
    ("update", "cause"),
    [
        ({"distance": 0.5, "along_weights": 0.01}, "weight_decay_per_micro_batch"),
        ({"state_distance": 0.5, "state_gate": 1e-3}, "optimizer_state_per_micro_batch"),
        ({"distance": 0.5, "along_weights": 0.5}, "unexplained"),
    ],
)
def test_equal_gradients_and_another_update(update: dict[str, Any], cause: str) -> None:
    facts = changed(EQUAL, update={"gate": 1e-3, **update})
    assert causes(facts) == [cause]
    assert explain_step(facts, judge_update=False) == []


ALIKE = RowFacts(outputs=0.0, residual=0.0, factors=((1.0, 1.0),))
Step = Callable[[float], dict[str, Any]]
UNEXPLAINED = Cause.unexplained


def rows(**seen: Any) -> RowFacts:
    return replace(ALIKE, **seen)


def test_small_differences_of_factors_count_where_they_are_known() -> None:
    """A baseline of the micro-batch that is almost the window's; rows count otherwise by 1e-4, and no weights give that."""
    small = changed(OFF, **WEIGHTED, raw={"distance": 5e-5})
    for spread, residual, expected in ((1e-4, 0.0, "normaliser_depends_on_split"), (1e-4, 1e-3, "mean_of_means")):
        seen = rows(factors=((1.0, 1.0 + spread), (1.0,)), residual=residual)
        assert causes(changed(small, probe={"made": True, "by_row": seen})) == [expected]
    assert causes(changed(small, parts={"weights": (1.0 + 1e-9, 1.0, 1.0 - 1e-9, 1.0)})) == ["unexplained"]


def test_gradients_that_clipping_alone_makes_different() -> None:
    clipped = changed(EQUAL, consumed={"distance": 0.5}, fits={"line": 1e-9}, scaling={"clipped": True, "limits": (0.1, 0.4)})
    (finding,) = explain_step(clipped)
    assert finding.cause is Cause.unexplained and "clipped to 0.1 where N=1 clips to 0.4" in finding.message
    (other,) = explain_step(changed(clipped, scaling={"limits": (0.4, 0.4)}))
    assert other.cause is Cause.unexplained and "times 1:" not in other.message


def test_parameters_that_something_else_has_moved() -> None:
    assert "something other than the optimizer" in explain_step(changed(OFF, window={"moved_before": 1e-3}))[0].message
    assert causes(changed(EQUAL, window={"moved_before": 1e-3})) == []


GATES: dict[str, tuple[Step, float, float, Cause, Cause]] = {  # constant -> facts, a value below and above, what they say
    "CONDITION_LIMIT": (
        lambda c: {**WEIGHTED, "parts": WEIGHTED["parts"] | {"condition": c}}, 0.99e6, 1.01e6, Cause.mean_of_means, UNEXPLAINED,
    ),
    "LOST": (lambda s: {"precision": {"float16": True, "lost": s}}, 0.049, 0.051, UNEXPLAINED, Cause.underflow_from_division),
    "CLEAR": (
        lambda c: {"gate": 0.5 / c, "partly": ("weight",), "probe": {"made": True}}, 9.9, 10.1, UNEXPLAINED,
        Cause.auxiliary_loss_scale,
    ),
    "SHRINKING": (
        lambda c: {"window": {"moves": 1, "move_along_weights": c}}, -0.991, -0.989, Cause.weight_decay_per_micro_batch,
        UNEXPLAINED,
    ),
    "ONE_NORM": (
        lambda d: {"scaling": {"rescaled": (1.0, 1 + d)}, "fits": {"sums": 0.0}}, 0.9e-4, 1.1e-4, Cause.clip_per_micro_batch,
        UNEXPLAINED,
    ),
    "UNEQUAL": (
        lambda d: {"ranks": 2, "by_rank": {"weights": ((1.0, 1 - d),), "residual": 0.0, "condition": 1.0}}, 0.009, 0.011,
        UNEXPLAINED, Cause.replica_scale,
    ),
    "UNEQUAL rows": (
        lambda d: {"probe": {"by_row": rows(factors=((1.0, 1 - d),))}}, 0.009, 0.011, UNEXPLAINED,
        Cause.normaliser_depends_on_split,
    ),
    "FACTOR_ROUNDINGS": (
        lambda d: {"precision": {"roundoff": 1e-3}, "probe": {"by_row": rows(factors=((1.0, 1 - d),))}}, 0.099, 0.101,
        UNEXPLAINED, Cause.normaliser_depends_on_split,
    ),
    "SAME_ROW": (
        lambda d: {"probe": {"by_row": rows(outputs=d), "mixed": True}}, 0.9e-3, 1.1e-3, UNEXPLAINED, Cause.batch_statistics,
    ),
    "ROW_ROUNDINGS": (
        lambda d: {"precision": {"roundoff": 1e-3}, "probe": {"by_row": rows(outputs=d), "mixed": True}}, 0.029, 0.031,
        UNEXPLAINED, Cause.batch_statistics,
    ),
    "ROUNDOFF of float16": (
        lambda d: {"precision": {"narrow": "float16"}, "fits": {"sum": 0.0, "own_sum": 5 * 2.0**-11 * d}}, 0.99, 1.01,
        Cause.low_precision_accumulator, UNEXPLAINED,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("step", "below", "above", "said", "then"), GATES.values(), ids=GATES)
def test_every_gate_accepts_below_and_rejects_above(step: Step, below: float, above: float, said: Cause, then: Cause) -> None:
    assert causes(changed(OFF, **step(below))) == [said]
    assert causes(changed(OFF, **step(above))) == [then]


def test_gates_of_the_update_and_of_a_mean_weight() -> None:
    update = {"distance": 0.5, "gate": 1e-3}
    assert causes(changed(EQUAL, update=update | {"along_weights": 0.049})) == ["weight_decay_per_micro_batch"]
    assert causes(changed(EQUAL, update=update | {"along_weights": 0.051})) == ["unexplained"]
    for off, residual, expected in (
        (1.9e-6, 1e-8, ["mean_of_means", "loss_not_divided"]),  # a gate of 1e-6, and a condition of 2
        (2.1e-6, 1e-8, ["unexplained"]),
        (0.9e-2, 1e-3, ["mean_of_means", "loss_not_divided"]),  # coarse arithmetic knows no weight better
        (1.1e-2, 1e-3, ["unexplained"]),
    ):
        weights = tuple(w * 0.25 * (1 + off) for w in (0.8, 1.2, 0.4, 1.6))
        coarse = changed(OFF, **WEIGHTED, gate=max(GATE, residual))
        assert causes(changed(coarse, parts={"weights": weights, "residual": residual})) == expected
