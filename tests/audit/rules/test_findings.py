"""The rules of a whole run alone, on plain numbers: windows, schedules, counters, averages and reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from accumulation_harness.audit.compare.facts import RunFacts, StepFacts
from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.rules.findings import explain, first_of_each
from accumulation_harness.judge.cause import Cause
from tests.audit.rules.cases import ALL_EQUAL, EQUAL, FIRST_EQUAL, OFF, RUN, RUNS, WINDOWS, changed
from tests.audit.rules.test_gradient_rules import WEIGHTED


def causes(run: RunFacts, steps: Sequence[StepFacts] = ALL_EQUAL) -> list[str]:
    return [f.cause for f in explain(run, steps)]


@pytest.mark.parametrize(("changes", "cause"), [case[1:] for case in RUNS], ids=[case[0] for case in RUNS])
def test_counters_speak_when_gradients_agree(changes: dict[str, Any], cause: Cause) -> None:
    assert causes(RUN) == []
    assert causes(changed(RUN, **changes)) == [cause]


@pytest.mark.parametrize(("changes", "cause"), [case[1:] for case in WINDOWS], ids=[case[0] for case in WINDOWS])
def test_windows_speak_only_where_gradients_differ(changes: dict[str, Any], cause: Cause) -> None:
    run = changed(RUN, **changes)
    assert causes(run) == []  # a window may be begun again, or hold the same rows under other names
    assert [(f.cause, f.optimizer_step) for f in explain(run, FIRST_EQUAL)] == [(cause, 1)]


def test_a_scale_that_grows_is_told_from_unequal_terms_by_the_full_window() -> None:
    facts = changed(changed(OFF, **WEIGHTED), parts={"weights": (8.0, 4.0, 2.0, 1.0)})
    short = changed(facts, step=1, window={"backwards": 2}, parts={"weights": (2.0, 1.0)})
    assert causes(RUN, [facts, short]) == ["scaler_updated_in_window"]
    assert "mean_of_means" in causes(RUN, [facts, changed(short, parts={"weights": (1.5, 0.5)})])
    for ratio, told in ((2.0 * 1.009, False), (2.0 * 1.011, True)):  # UNEQUAL
        weights = (2 * ratio / (1 + ratio), 2 / (1 + ratio))
        assert ("mean_of_means" in causes(RUN, [facts, changed(short, parts={"weights": weights})])) == told


def test_a_single_micro_batch_is_no_short_window_where_full_ones_are_divided_twice() -> None:
    single = changed(OFF, step=1, window={"backwards": 1}, fits={"k_over_n": 0.0, "over_n": 0.0})
    run = changed(RUN, mine={"backwards": (4, 1, 4)})
    assert causes(run, [changed(OFF, fits={"over_n": 0.0}), single]) == ["loss_divided_twice"]
    assert causes(run, [EQUAL, single]) == ["short_window_divided_by_n"]


def test_copies_that_nothing_updates_are_no_averages() -> None:
    kept = changed(RUN, shadow_distances=((1, 0.5, 1e-3),), mine={"shadow_updates": (0,) * 3})
    assert causes(kept) == []
    assert causes(changed(kept, mine={"shadow_updates": (4, 4, 4)})) == ["ema_per_micro_batch"]
    as_often = changed(kept, mine={"shadow_updates": (1, 1, 1)}, reference={"shadow_updates": (1, 1, 1)})
    assert causes(as_often) == ["unexplained"]
    assert causes(replace(as_often, shadow_moves_inside=True)) == ["ema_per_micro_batch"]
    assert causes(replace(as_often, shadow_distances=((1, 0.99e-3, 1e-3),))) == []


def test_buffers_speak_only_when_nothing_else_does() -> None:
    steps = [EQUAL, changed(EQUAL, step=1, layers={"buffers": ("mean",)}), replace(EQUAL, step=2)]
    (finding,) = explain(RUN, steps)
    assert finding.cause == "batch_statistics" and finding.optimizer_step == 1 and "mean" in finding.message
    assert causes(changed(RUN, mine={"state_steps": (4.0, 8.0, 12.0)}), steps) == ["optimizer_state_per_micro_batch"]


def test_rows_that_are_drawn_are_stochastic() -> None:
    run = changed(RUN, windows=("same", "different", "different"), foreign=8, never=8)
    drawn = [changed(facts, window={"drawn_outside": True}) for facts in FIRST_EQUAL]
    assert causes(run, drawn) == ["stochastic_layers"]
    assert causes(replace(run, never=0), FIRST_EQUAL) == ["window_misplaced"]


def test_one_finding_per_cause_lists_its_steps() -> None:
    (finding,) = explain(RUN, [changed(OFF, step=t, fits={"times_n": 1e-8}) for t in range(3)])
    assert finding.optimizer_step == 0 and finding.steps == (0, 1, 2) and finding.evidence["steps"] == [0, 1, 2]
    with pytest.raises(FrozenInstanceError):
        finding.steps = ()  # type: ignore[misc]


def found(cause: Cause, kind: Any, step: int | None = 0) -> Finding:
    return Finding(4, step, cause, {}, "", kind, "SGD")


def test_an_unexplained_gradient_or_rate_stays_beside_what_is_explained() -> None:
    named = found(Cause.loss_not_divided, "predicted")
    for kind, stays in (("gradient", True), ("schedule", True), ("update", False), ("average", False), ("seen", False)):
        other = found(Cause.unexplained, kind, 1)
        assert [f.cause for f in first_of_each([named, other])] == [named.cause] + [other.cause] * stays
        assert [f.cause for f in first_of_each([other])] == [other.cause]
    assert not found(Cause.schedule_per_micro_batch, "schedule").unreproduced
    assert first_of_each([named])[0].evidence == {"steps": [0]} and named.evidence == {}  # what was given stays as it was
    assert first_of_each([found(Cause.counter_wrong, "report", None)])[0].steps == ()


SCHEDULE, REPORT, OTHER = Cause.schedule_per_micro_batch, Cause.loss_report_differs, Cause.unexplained
Run = Callable[[float], dict[str, Any]]


def rates(mine: Sequence[float], theirs: Sequence[float] = (0.1, 0.1, 0.1)) -> dict[str, Any]:
    return {"mine": {"lrs": tuple((lr,) for lr in mine)}, "reference": {"lrs": tuple((lr,) for lr in theirs)}}


def losses(reported: float, differentiated: float | None = None) -> dict[str, Any]:
    own = ((), ()) if differentiated is None else ((differentiated,), (1.0,))
    return {"mine": {"reported": (reported,), "losses": own[0]}, "reference": {"reported": (1.0,), "losses": own[1]}}


GATES: dict[str, tuple[Run, float, float, list[Cause], list[Cause]]] = {  # facts by a value, two values, what is said
    "SAME_LR": (lambda d: rates((0.1, 0.1 * (1 + d), 0.1)), 0.9e-9, 1.1e-9, [], [OTHER]),
    "STRETCHED": (lambda d: rates((0.1, 0.15 - 0.2 * d, 0.2), (0.1, 0.2, 0.3)), 0.029, 0.031, [SCHEDULE], [OTHER]),
    "STRETCHED_MOVEMENT": (
        lambda d: rates((0.1, 0.105 - d * 0.01, 0.11), (0.1, 0.11, 2.0)), 0.19, 0.21, [SCHEDULE], [OTHER],
    ),
    "MANY_MORE": (
        lambda n: {"mine": {"steps": int(n), "backwards": (1,) * int(n)}, "reference": {"steps": 8}}, 12, 11,
        [Cause.step_every_micro_batch], [Cause.window_misplaced],
    ),
    "UNKNOWN_LOSS": (lambda d: losses(1 + d), 0.9e-3, 1.1e-3, [], [REPORT]),
    "LEAST_LOSS": (lambda d: losses(1 + d, 1.0), 0.9e-4, 1.1e-4, [], [REPORT]),
    "LOSSES_APART": (lambda d: losses(1 + d, 1.0005), 4.9e-3, 5.1e-3, [], [REPORT]),
    "MOST_LOSS": (lambda d: losses(1 + d, 1.5), 0.9e-2, 1.1e-2, [], [REPORT]),
}  # fmt: skip


@pytest.mark.parametrize(("run", "below", "above", "said", "then"), GATES.values(), ids=GATES)
def test_every_gate_accepts_below_and_rejects_above(
    run: Run, below: float, above: float, said: list[Cause], then: list[Cause]
) -> None:
    two = changed(RUN, accumulation_steps=2, mine={"backwards": (2, 2, 2)})
    assert causes(changed(two, **run(below))) == said
    assert causes(changed(two, **run(above))) == then
