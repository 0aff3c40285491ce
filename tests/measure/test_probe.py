"""What a probe counts and keeps, beside its definition."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accumulation_harness.judge.signature import Samples
from accumulation_harness.measure.probe import count_samples
from accumulation_harness.recipes.hand_written import FOREIGN, NO_SAMPLE
from accumulation_harness.referee.oracle import Loss

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


def test_a_loss_whose_terms_cancel_is_as_exact_as_its_terms() -> None:
    """Advantages sum to zero, and so may a policy's loss; 1e-14 of its terms is 1e-6 of the rest."""
    assert Loss(1e-8, 1.0).error(1e-8 + 1e-14) == pytest.approx(1e-14, rel=1e-2)
    assert Loss(1e-8, 1.0).error(4e-8) == pytest.approx(3e-8)  # four times the loss is still a difference
    assert Loss(0.0, 0.0).error(0.0) == 0.0 and Loss(0.0, 0.0).error(1e-9) == math.inf
