"""Rules on plain numbers: what names a cause, and what must not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from harness.judge.diagnosis import Attribution, Signature, WrongWindow, describe, diagnose, explanations, roughness, telling

FOURFOLD = Attribution(distance=3.0, scale=4.0, cosine=1.0, weights=(4.0,) * 4, residual=1e-16, condition=3.0)
RIGHT = Attribution(distance=0.0, scale=1.0, cosine=1.0, weights=(1.0,) * 4, residual=1e-16, condition=3.0)
WINDOW = WrongWindow(
    step=0, samples=64, micro_batches=4, clip_norm=None, whole=FOURFOLD, groups={"matrices": FOURFOLD, "vectors": FOURFOLD},
    tensors={"weight": FOURFOLD, "bias": FOURFOLD},
)  # fmt: skip
UNDIVIDED = {"": 0.1, "loss_not_divided": 1e-15}
CLEARED = {"gradients_cleared_in_window": 0.0, "resume_in_window": 0.0}
SHORT = {"loss_divided_twice": 0.0, "short_window_divided_by_n": 0.0}
BESIDE = {f"batch_statistics+{cause}": 0.0 for cause in CLEARED}
WRONG = Signature(probes=5, wrong=5, worst=WINDOW, explanations={"loss_not_divided": 1e-16})


@pytest.mark.parametrize(
    ("changes", "counters", "causes", "explained"),
    [
        ({}, {}, ("loss_not_divided",), True),
        ({"explanations": {"loss_not_divided": 1e-11}}, {}, ("unexplained",), False),
        ({"explanations": {}}, {}, ("unexplained",), False),
        ({"explanations": {"a": math.nan}}, {}, ("unexplained",), False),
        ({"resolved": {"stochastic_layers": 1e-15}}, {}, ("stochastic_layers",), True),
        ({"resolved": {"stochastic_layers": 0.1}}, {}, ("loss_not_divided",), True),
        (
            {"explanations": {"batch_statistics+loss_not_divided": 1e-15, "loss_divided_twice": 0.3}},
            {},
            ("batch_statistics", "loss_not_divided"),
            True,
        ),
        (
            {"explanations": {"loss_not_divided": 1e-15, "batch_statistics+clip_per_micro_batch": 0.0}},
            {},
            ("loss_not_divided",),
            True,
        ),
        ({}, {"schedule index": (8.0, 2.0)}, ("loss_not_divided", "schedule_per_micro_batch"), True),
        ({"steps_in_window": (4, 4), "moved_in_window": 0.1}, {}, ("step_every_micro_batch",), True),
        ({"steps_in_window": (2, 4), "moved_in_window": 0.1}, {}, ("window_misplaced",), True),
        ({"steps_in_window": (2, 2)}, {}, ("window_misplaced",), True),
        ({"steps_in_window": (4, 4), "steps_before_last_forward": 3}, {}, ("optimizer_state_per_micro_batch",), True),
        ({"steps_before_last_forward": 1, "moved_in_window": 0.1}, {}, ("window_misplaced",), True),
        ({"skipped_windows": 1}, {}, ("window_misplaced",), True),
        ({"unknown_rows": 3}, {}, ("foreign_gradients",), True),
        ({"unknown_rows": 3, "missing_samples": 3}, {}, ("unexplained",), False),
        ({"missing_samples": 1, "beside": UNDIVIDED}, {}, ("window_misplaced", "loss_not_divided"), True),
        ({"missing_samples": 1, "beside": {**UNDIVIDED, "": 1e-15}}, {}, ("window_misplaced",), True),
        ({"missing_samples": 1, "beside": {"": 0.1, "loss_not_divided": 0.1}}, {}, ("window_misplaced",), True),
        ({"explanations": CLEARED}, {}, ("gradients_cleared_in_window",), True),
        ({"explanations": CLEARED, "wrong": 1}, {}, ("resume_in_window",), True),
        ({"explanations": SHORT}, {}, ("loss_divided_twice",), True),
        ({"explanations": SHORT, "wrong": 1}, {}, ("short_window_divided_by_n",), True),
        ({"explanations": BESIDE}, {}, ("batch_statistics", "gradients_cleared_in_window"), True),
        ({"explanations": BESIDE, "at_rest": ("batch_statistics",)}, {}, ("batch_statistics", "resume_in_window"), True),
        ({}, {"schedule index": (1.0, 2.0)}, ("loss_not_divided",), True),
        ({"moved_in_window": 1e-3, "moved_along_weights": -1.0, "decays_fit": False}, {}, ("unexplained",), False),
        ({"repeated_samples": 1, "missing_samples": 1}, {}, ("samples_repeated",), True),
        ({"missing_samples": 1}, {}, ("window_misplaced",), True),
        ({"moved_in_window": 1e-3, "moved_along_weights": -1.0}, {}, ("weight_decay_per_micro_batch",), True),
        ({"moved_in_window": 1e-3, "moved_along_weights": 0.5}, {}, ("unexplained",), False),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_and_windows(
    changes: dict[str, Any], counters: dict[str, Any], causes: tuple[str, ...], explained: bool
) -> None:
    found = diagnose(dataclasses.replace(WRONG, **changes), counters)
    assert (found.causes, found.explained) == (causes, explained)
    assert len(found.sentences) == len(causes)


@pytest.mark.parametrize(
    ("changes", "counters", "cause"),
    [
        ({"state_errors": {"ema": 0.1}, "average_error": 1e-15}, {}, "ema_per_micro_batch"),
        ({"state_errors": {"ema": 0.1}, "average_error": 0.1}, {}, "unexplained"),
        ({}, {"BatchNorm num_batches_tracked": (8.0, 4.0)}, "batch_statistics"),
        ({"loss_error": 0.1}, {"windows at another learning rate": (5.0, 0.0)}, "loss_report_differs"),
        ({}, {"windows at another learning rate": (5.0, 0.0)}, "unexplained"),
        ({"state_errors": {"exp_avg": 0.1, "exp_avg_sq": 0.0}, "advanced_error": 1e-15}, {}, "optimizer_state_per_micro_batch"),
        ({"state_errors": {"exp_avg": 0.1, "exp_avg_sq": 0.0}, "advanced_error": 0.2}, {}, "unexplained"),
        ({"update_error": 0.1, "update_along_weights": -1.0, "decays_fit": False}, {}, "unexplained"),
        ({}, {"schedule index": (9.0, 10.0), "optimizer steps": (9.0, 10.0)}, "window_misplaced"),
        ({}, {"optimizer state's step": (8.0, 2.0)}, "optimizer_state_per_micro_batch"),
        ({"update_error": 0.1, "update_along_weights": -1.0}, {}, "weight_decay_per_micro_batch"),
        ({"update_error": 0.1, "update_along_weights": 0.2}, {}, "unexplained"),
        ({"loss_error": 0.1}, {}, "loss_report_differs"),
        ({}, {"samples counted": (80.0, 40.0)}, "counter_wrong"),
        ({}, {"optimizer steps": (9.0, 10.0)}, "window_misplaced"),
        ({}, {"optimizer steps": (9.0, 10.0), "optimizer state's step": (9.0, 10.0)}, "window_misplaced"),
        ({"survivors_error": 1e-15}, {}, "non_finite_micro_batch"),
        ({"survivors_error": 1e-3}, {"finite weights": (1.0, 0.0)}, "unexplained"),
        ({"survivors_error": 1e-15, "state_errors": {"ema": 0.1}, "average_error": 0.0}, {}, "ema_per_micro_batch"),
        ({}, {"loss scale": (2.0, 1.0)}, "unexplained"),
        ({}, {}, "unexplained"),
    ],
    ids=str,
)
def test_faults_that_leave_the_gradient_alone(changes: dict[str, Any], counters: dict[str, Any], cause: str) -> None:
    assert diagnose(Signature(probes=5, **changes), counters).cause == cause


def test_a_cause_must_fit_every_wrong_window() -> None:
    assert explanations([{"a": 1e-16, "b": 1e-15}, {"a": 0.2, "b": 1e-14}, {"b": 1e-16}]) == {"b": 1e-14}
    assert explanations([]) == {}


def test_beside_batch_norm_a_second_cause_may_rest_in_some_windows() -> None:
    windows: list[dict[str, float]] = [
        {"batch_statistics": 1e-15},
        {"batch_statistics": 0.3, "batch_statistics+short": 1e-14, "short": 0.2},
    ]
    assert explanations(windows) == {"batch_statistics": 0.3, "batch_statistics+short": 1e-14}


def test_near_the_gate_a_cause_that_changes_nothing_does_not_explain() -> None:
    assert telling({"same as right": 0.98e-12, "true": 1e-16}, 1.02e-12) == {"true": 1e-16}


def test_the_evidence_is_a_sentence() -> None:
    assert describe(WINDOW) == "the accumulated gradient is 4 times the full batch's in the same direction"
    turned = dataclasses.replace(
        WINDOW,
        whole=dataclasses.replace(FOURFOLD, cosine=0.9, weights=(0.0, 0.0, 0.0, 1.0)),
        groups={"matrices": FOURFOLD, "vectors": RIGHT},
        tensors={**WINDOW.tensors, "bias": RIGHT},
    )
    assert "in weight of the parameter group matrices alone" in describe(turned)
    assert "0, 0, 0, 1 of their right weights" in describe(turned)


def test_vanished_entries_are_underflow() -> None:
    cause, sentences = roughness(0.1, 0.001)
    assert cause == "underflow_from_division" and "10.0%" in sentences[0]
    assert roughness(0.1, 0.0999) == roughness(math.nan, 0.0) == ("", ())
