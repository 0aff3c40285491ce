"""What a probe counts and keeps, beside its definition."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from accumulation_harness.judge.signature import Samples
from accumulation_harness.measure.probe import count_samples
from accumulation_harness.recipes.hand_written import FOREIGN, NO_SAMPLE

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
