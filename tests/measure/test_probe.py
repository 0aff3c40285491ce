"""What a probe counts and keeps, beside its definition."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accumulation_harness.judge.cause import Cause, Causes
from accumulation_harness.judge.signature import Samples
from accumulation_harness.measure.probe import count_samples, fingerprint, keep_smallest, loss_error
from accumulation_harness.recipes.hand_written import FOREIGN, NO_SAMPLE
from accumulation_harness.referee.oracle import Loss
from tests.toy import make_arm

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(IDS, st.sets(st.integers(0, 9), min_size=1), st.integers(0, 2), st.integers(0, 2))
def test_samples_are_counted_as_a_multiset_says(seen: list[int], window: set[int], foreign: int, unknown: int) -> None:
    rows = [*seen, *[FOREIGN] * foreign, *[NO_SAMPLE] * unknown]
    expected = Samples(
        repeated=sum((Counter(seen) - Counter(set(seen))).values()),
        missing=len(window - set(seen)),
        foreign=len(set(seen) - window) + foreign,
        unknown=unknown,
    )
    assert count_samples(torch.tensor(rows), torch.tensor(sorted(window))) == expected


def test_the_window_itself_has_nothing_to_count() -> None:
    assert count_samples(torch.tensor([3, 1, 2]), torch.tensor([1, 2, 3])) == Samples()


def test_of_the_variants_of_a_cause_the_nearest_is_kept_beside_its_context() -> None:
    consumed = torch.tensor([3.0, 4.0], dtype=torch.float64)
    variants = [
        (Cause.mean_of_means, "twice", 2 * consumed),
        (Cause.mean_of_means, "nearly", 1.1 * consumed),
        (Cause.loss_not_divided, "exact", consumed),
    ]
    smallest: dict[Causes, float] = {(Cause.mean_of_means,): 0.05}
    keep_smallest(smallest, consumed, variants)
    keep_smallest(smallest, consumed, variants[:2], (Cause.batch_statistics,))
    # ||a - h|| / ||h||: 1/2 of twice the gradient, 1/11 of 1.1 times it.
    assert smallest == {
        (Cause.mean_of_means,): 0.05,
        (Cause.loss_not_divided,): 0.0,
        (Cause.batch_statistics, Cause.mean_of_means): pytest.approx(1 / 11, rel=1e-12),
    }


def test_weights_are_recognised_by_their_fingerprint() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert fingerprint(weights) == (6.0, 14.0) == fingerprint(weights.clone())
    assert fingerprint(weights * (1 + 2**-50)) != fingerprint(weights)


def test_a_loss_is_as_exact_as_the_format_it_is_reported_in() -> None:
    arm, one = make_arm(lambda size: [size]), Loss(1.0, 1.0)
    assert loss_error(arm, 1.001, one) == pytest.approx(1e-3)
    arm.loss_resolution = 2e-3
    assert loss_error(arm, 1.001, one) == 0.0 and loss_error(arm, 1.003, one) == pytest.approx(3e-3)
    assert math.isnan(loss_error(arm, math.nan, one))


def test_a_loss_whose_terms_cancel_is_as_exact_as_its_terms() -> None:
    """Advantages sum to zero, and so may a policy's loss; 1e-14 of its terms is 1e-6 of the rest."""
    assert Loss(1e-8, 1.0).error(1e-8 + 1e-14) == pytest.approx(1e-14, rel=1e-2)
    assert Loss(1e-8, 1.0).error(4e-8) == pytest.approx(3e-8)  # four times the loss is still a difference
    assert Loss(0.0, 0.0).error(0.0) == 0.0 and Loss(0.0, 0.0).error(1e-9) == math.inf
