"""Claims that recorded caches and arithmetic decide."""

import pandas as pd
import pytest

from accumulation_harness.analysis.question import Ruling
from accumulation_harness.experiments.accounting.answers import cache_ruling


def caches(*, old=100, new=0, beyond=0):
    """Bytes per sample of the caches of two releases, and of those that autograd does not hold."""
    return pd.DataFrame(
        [
            {"version": version, "way": "loop", "micro_batch": b, "cache_bytes": each * b, "not_saved_bytes": beyond * b}
            for version, each in (("4", old), ("5", new)) for b in (1, 2)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (caches(), Ruling.conditional),
        (caches(new=100, beyond=10), Ruling.confirmed),
        (caches(old=0), Ruling.refuted),
        (caches().assign(cache_bytes=[1, 5, 0, 0]), Ruling.needs_full_grid),  # not in proportion to b
    ],
)
def test_d3(rows, verdict):
    assert cache_ruling(rows).verdict == verdict
