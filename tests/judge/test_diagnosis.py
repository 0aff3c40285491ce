"""Rules on plain numbers: what names a cause, and what must not."""

import dataclasses
import math

import pytest

from accumulation_harness.judge.cause import parsed
from accumulation_harness.judge.counters import Counter
from accumulation_harness.judge.diagnosis import diagnose
from accumulation_harness.judge.signature import Attribution, Movement, Samples, Signature, WrongWindow

FOURFOLD = Attribution(distance=3.0, scale=4.0, cosine=1.0, weights=(4.0,) * 4, residual=1e-16, condition=3.0)
WINDOW = WrongWindow(
    step=0, samples=64, micro_batches=4, clip_norm=None, whole=FOURFOLD, groups={"matrices": FOURFOLD, "vectors": FOURFOLD},
    tensors={"weight": FOURFOLD, "bias": FOURFOLD},
)  # fmt: skip
Window = dict[str, float]  # joined causes -> error


OTHER_SAMPLES = Samples(missing=1)


def windows(*errors):
    return tuple({parsed(causes): error for causes, error in each.items()} for each in errors)


UNDIVIDED = {"": 0.1, "loss_not_divided": 1e-15}
CLEARED = {"gradients_cleared_in_window": 0.0, "resume_in_window": 0.0}
SHORT = {"loss_divided_twice": 0.0, "short_window_divided_by_n": 0.0}
BESIDE = {f"batch_statistics+{cause}": 0.0 for cause in CLEARED}
WRONG = Signature(probes=5, worst_window=WINDOW, wrong_windows=windows(*[{"loss_not_divided": 1e-16}] * 5))


def wrong(*errors):
    """All five probed windows wrong: one kind of window, or several and as many of the last as are left."""
    return {"wrong_windows": windows(*errors[:-1], *[errors[-1]] * (6 - len(errors)))}


@pytest.mark.parametrize(
    ("changes", "counters", "causes", "explained"),
    [
        (wrong({"loss_not_divided": 1e-11}), {}, ("unexplained",), False),
        (wrong({"loss_not_divided": math.nan}), {}, ("unexplained",), False),
        ({"wrong_windows": (), "drawn_error": 0.4}, {}, ("stochastic_layers",), True),
        (
            wrong({"batch_statistics+loss_not_divided": 1e-15, "loss_divided_twice": 0.3}),
            {},
            ("batch_statistics", "loss_not_divided"),
            True,
        ),
        (
            wrong({"loss_not_divided": 1e-15, "batch_statistics+clip_per_micro_batch": 0.0}),
            {},
            ("loss_not_divided",),
            True,
        ),
        ({}, {Counter.schedule_index: (8.0, 2.0)}, ("loss_not_divided", "schedule_per_micro_batch"), True),
        ({"steps_in_window": (4, 4), "moved": Movement(0.1)}, {}, ("step_every_micro_batch",), True),
        ({"steps_in_window": (4, 4), "steps_before_last_forward": 3}, {}, ("optimizer_state_per_micro_batch",), True),
        ({"samples": Samples(unknown=3, missing=3)}, {}, ("unexplained",), False),
        ({"samples": OTHER_SAMPLES, "other_samples": windows(UNDIVIDED)}, {}, ("window_misplaced", "loss_not_divided"), True),
        ({"samples": OTHER_SAMPLES, "other_samples": windows({**UNDIVIDED, "": 1e-15})}, {}, ("window_misplaced",), True),
        (wrong(CLEARED), {}, ("gradients_cleared_in_window",), True),
        ({"wrong_windows": windows(CLEARED)}, {}, ("resume_in_window",), True),
        (wrong(SHORT), {}, ("loss_divided_twice",), True),
        ({"wrong_windows": windows(SHORT)}, {}, ("short_window_divided_by_n",), True),
        (wrong(BESIDE), {}, ("batch_statistics", "gradients_cleared_in_window"), True),
        (wrong({"batch_statistics": 0.0}, BESIDE), {}, ("batch_statistics", "resume_in_window"), True),
        ({}, {Counter.schedule_index: (1.0, 2.0)}, ("loss_not_divided",), True),
        ({"moved": Movement(1e-3, -1.0), "decays_fit": False}, {}, ("unexplained",), False),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_and_windows(changes, counters, causes, explained):
    found = diagnose(dataclasses.replace(WRONG, **changes), counters)
    assert (found.causes, found.explained) == (causes, explained)
    assert len(found.sentences) == len(causes)


@pytest.mark.parametrize(
    ("changes", "counters", "cause"),
    [
        ({"state_errors": {"ema": 0.1}, "average_error": 0.1}, {}, "unexplained"),
        ({"loss_error": 0.1}, {Counter.windows_at_another_rate: (5.0, 0.0)}, "loss_report_differs"),
        ({}, {Counter.windows_at_another_rate: (5.0, 0.0)}, "unexplained"),
        ({"state_errors": {"exp_avg": 0.1, "exp_avg_sq": 0.0}, "advanced_error": 0.2}, {}, "unexplained"),
        ({"update": Movement(0.1, -1.0), "decays_fit": False}, {}, "unexplained"),
        ({}, {Counter.schedule_index: (9.0, 10.0), Counter.optimizer_steps: (9.0, 10.0)}, "window_misplaced"),
        ({}, {Counter.state_step: (8.0, 2.0)}, "optimizer_state_per_micro_batch"),
        ({}, {Counter.optimizer_steps: (9.0, 10.0)}, "window_misplaced"),
        ({}, {Counter.optimizer_steps: (9.0, 10.0), Counter.state_step: (9.0, 10.0)}, "window_misplaced"),
        ({"survivors_error": 1e-3}, {Counter.poisoned_finite: (1.0, 0.0)}, "unexplained"),
        ({"survivors_error": 1e-15, "state_errors": {"ema": 0.1}, "average_error": 0.0}, {}, "ema_per_micro_batch"),
        ({}, {}, "unexplained"),
    ],
    ids=str,
)
def test_faults_that_leave_the_gradient_alone(changes, counters, cause):
    assert diagnose(Signature(probes=5, **changes), counters).causes == (cause,)
