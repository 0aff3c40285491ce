"""The smallest planted error from which on all larger ones are found."""

import math

import pandas as pd
import pytest

from accumulation_harness.experiments.sensitivity.answers import rates, smallest
from tests.golden import kept_results


@pytest.mark.parametrize(
    ("counts", "size"),
    [
        ([19, 20, 20], 1.0),  # 95 % are enough
        ([18, 20, 20], 2.0),
        ([20, 18, 20], 3.0),  # a gap above
        ([20, 20, 18], math.nan),
    ],
)
def test_smallest_size_with_all_larger_ones(counts, size):
    found = smallest(pd.DataFrame({"size": [1.0, 2.0, 3.0], "k": counts, "n": 20}))
    assert found == size or (math.isnan(found) and math.isnan(size))


def test_rates_count_the_arms_of_a_size_that_are_otherwise_than_the_correct_one():
    arms = kept_results().of("sensitivity").arms
    table = rates(arms)
    found = arms.assign(found=arms["verdict"].isin(["different", "degraded"])).groupby(["precision", "arm"])["found"]
    wanted = {(precision, arm.partition("@")[0], float(arm.partition("@")[2])): (own.sum(), len(own))
              for (precision, arm), own in found if "@" in arm}  # fmt: skip
    assert {(row.precision, row.kind, row.size): (row.k, row.n) for row in table.itertuples()} == wanted
    assert (table["k"] == 0).any() and ((table["k"] > 0) & (table["k"] < table["n"])).any() and (table["k"] == table["n"]).any()
