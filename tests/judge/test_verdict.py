import dataclasses
import math

import pytest

from accumulation_harness.config import Precision
from accumulation_harness.judge.counters import Counter
from accumulation_harness.judge.verdict import Algebra, Evidence, Outcome, Rounding, Trajectory, judge
from tests.judge.test_diagnosis import WRONG, wrong

ALGEBRA = Algebra(
    gradient_error=1e-15, state_error=1e-15, trajectory_error=1e-14, loss_error=1e-16, steps=200, floor=1e-15,
    clipping_active=True, clipped_share=0.5, short_windows=8, unequal_terms=True,
)  # fmt: skip
ROUNDING = Rounding(
    ratio=0.5, low=0.4, high=0.6, full_error=2e-7, arm_error=1e-7, permutations=99, scale=1.0, cosine=1.0,
    full_factor=1.0, factor_range=1e-7, residual=1e-7, weights=(1.0, 1.0), condition=2.0, skipped=0,
)  # fmt: skip
GOOD = Evidence(
    precision=Precision.float32,
    algebra=ALGEBRA,
    rounding=ROUNDING,
    trajectory=Trajectory(ratio=1.0, jump_step=None, final_distance=1e-6),
    counters={},
)


def changed(**changes):
    """`GOOD` with fields of its parts replaced: `algebra__floor=1` and the like."""
    evidence = GOOD
    for path, value in changes.items():
        part, _, name = path.partition("__")
        evidence = dataclasses.replace(
            evidence, **{part: dataclasses.replace(getattr(evidence, part), **{name: value}) if name else value}
        )
    return evidence


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, Outcome.equivalent),
        ({"algebra__gradient_error": 1e-12}, Outcome.equivalent),
        ({"algebra__gradient_error": 1.01e-12}, Outcome.different),
        ({"algebra__state_error": 1.01e-12}, Outcome.different),
        ({"algebra__trajectory_error": 1.01e-9}, Outcome.different),
        ({"algebra__loss_error": 1.01e-12}, Outcome.different),
        ({"algebra__gradient_error": math.nan}, Outcome.inconclusive),  # a measure that failed is no difference, nor a pass
        ({"algebra__trajectory_error": math.nan}, Outcome.inconclusive),
        ({"algebra__gradient_error": math.nan, "counters": {Counter.optimizer_steps: (5.0, 6.0)}}, Outcome.different),
        ({"algebra__steps": 0}, Outcome.inconclusive),
        ({"algebra__floor": 1e-7}, Outcome.inconclusive),
        ({"algebra__floor": 1e-7, "algebra__gradient_error": 0.99e-3}, Outcome.inconclusive),  # 1e4 times the floor
        ({"algebra__floor": 1e-7, "algebra__gradient_error": 1.01e-3}, Outcome.different),
        ({"algebra__floor": 1e-6, "algebra__gradient_error": 0.5}, Outcome.inconclusive),
        (
            {"algebra__floor": 1e-6, "algebra__gradient_error": 0.5, "signature": dataclasses.replace(WRONG, gradient_error=0.5)},
            Outcome.different,
        ),
        ({"algebra__floor": 2e-12, "algebra__gradient_error": 0.99e-6}, Outcome.inconclusive),
        ({"algebra__floor": 2e-12, "algebra__gradient_error": 1.01e-6}, Outcome.different),
        ({"algebra__floor": 2e-12, "algebra__trajectory_error": 1e3}, Outcome.inconclusive),
        ({"algebra__floor": 1e-5, "counters": {Counter.optimizer_steps: (60.0, 59.0)}}, Outcome.different),
        ({"counters": {Counter.optimizer_steps: (60.0, 59.0)}}, Outcome.different),
        ({"rounding__high": 2.0}, Outcome.equivalent),
        ({"rounding__high": 2.01, "rounding__full_error": 2.39e-7}, Outcome.degraded),
        ({"rounding__high": 2.01, "rounding__full_error": 2.38e-7}, Outcome.equivalent),  # the same
        ({"rounding__scale": 1 + 1.3e-6}, Outcome.degraded),  # 2 * 2^-23 + 10 times the range
        ({"rounding__scale": 1 + 1.2e-6}, Outcome.equivalent),
        ({"rounding__scale": 1.05, "rounding__full_error": 0.1, "precision": Precision.bfloat16}, Outcome.degraded),
        ({"rounding__scale": 1.01, "rounding__full_error": 0.1, "precision": Precision.bfloat16}, Outcome.equivalent),
        ({"rounding__ratio": math.nan, "rounding__high": math.nan}, Outcome.inconclusive),
        ({"rounding__ratio": math.nan, "rounding__high": math.nan, "precision": Precision.float64}, Outcome.equivalent),
        ({"rounding__ratio": math.nan, "algebra__gradient_error": 0.1}, Outcome.different),  # L0 decides alone
        ({"rounding__scale": math.nan}, Outcome.inconclusive),
        (
            {"rounding__scale": 0.0, "rounding__cosine": math.nan, "rounding__full_zeros": 0.1},
            Outcome.degraded,
        ),  # it alone vanishes
        ({"finite": False}, Outcome.inconclusive),
        ({"finite": False, "algebra__gradient_error": 51.9, "algebra__trajectory_error": 2e8}, Outcome.different),
        ({"finite": False, "algebra__state_error": 1e-3}, Outcome.different),
        ({"finite": False, "algebra__gradient_error": math.nan}, Outcome.inconclusive),
        ({"finite": False, "algebra__gradient_error": math.inf}, Outcome.inconclusive),
        ({"finite": False, "algebra__trajectory_error": 2e8}, Outcome.inconclusive),  # what a right arm's rounding may do
        ({"finite": False, "algebra__gradient_error": 51.9, "algebra__floor": 1e-7}, Outcome.inconclusive),
        ({"trajectory__ratio": 1e3}, Outcome.equivalent),
    ],
    ids=str,
)
def test_gates(changes, outcome):
    verdict = judge(changed(**changes))
    assert verdict.verdict == outcome
    assert (len(verdict.reasons) > 1) == (outcome != Outcome.equivalent)
    assert verdict.reasons[-1].startswith("compared: ")


@pytest.mark.parametrize(
    ("zeros", "full_zeros", "causes"),
    [
        (0.09, 0.0, ("batch_statistics", "underflow_from_division")),  # the least share that planted underflow had
        (0.009, 0.0, ("batch_statistics",)),
        (0.2, 0.13, ("batch_statistics",)),  # the loss scale is too small for the full batch as well
    ],
)
def test_underflow_beside_an_inherent_cause_takes_a_full_batch_without_any(zeros, full_zeros, causes):
    inherent = dataclasses.replace(WRONG, **wrong({"batch_statistics": 0.0}))
    evidence = changed(
        algebra__gradient_error=0.4,
        rounding__zeros=zeros,
        rounding__full_zeros=full_zeros,
        precision=Precision.float16,
        signature=inherent,
    )
    verdict = judge(evidence)
    assert verdict.causes == causes and verdict.explained == (len(causes) == 1)


@pytest.mark.parametrize(
    ("precision", "scale", "cause"),
    [
        (Precision.float16, 0.0, "underflow_from_division"),
        (Precision.float16, 0.5, "gradients_cleared_in_window"),
        (Precision.bfloat16, 0.0, "gradients_cleared_in_window"),
    ],
)
def test_a_gradient_that_vanishes_in_float16_alone_was_not_cleared(precision, scale, cause):
    window = dataclasses.replace(WRONG.worst_window, whole=dataclasses.replace(WRONG.worst_window.whole, scale=scale))
    narrow = dataclasses.replace(WRONG, worst_window=window, **wrong({"gradients_cleared_in_window": 0.0}))
    assert judge(changed(precision=precision, narrow=narrow, rounding__full_zeros=0.0)).causes == (cause,)


def test_weights_that_leave_what_shuffled_rows_do_are_a_remark():
    verdict = judge(changed(trajectory__ratio=1.1e3, trajectory__step=7))
    assert verdict.verdict == Outcome.equivalent and "1e+03 times" in verdict.reasons[0]


@pytest.mark.parametrize(
    ("wrong_windows", "counters", "outcome"),
    [(1, {}, Outcome.inconclusive), (4, {}, Outcome.different), (1, {Counter.windows: (2, 1)}, Outcome.different)],
)
def test_a_gradient_that_is_wrong_once_and_without_a_cause_is_not_blamed_in_float32(wrong_windows, counters, outcome):
    """A ReLU may have flipped; in every window it is the loop's."""
    signature = dataclasses.replace(WRONG, probes=4, gradient_error=1e-2, wrong_windows=({},) * wrong_windows)
    evidence = changed(algebra__not_float64="it cannot", algebra__floor=1e-7, signature=signature, counters=counters)
    assert judge(evidence).verdict == outcome
