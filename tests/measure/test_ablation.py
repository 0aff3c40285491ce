"""The factor whose removal closes the gap is the one that opened it."""

import pytest
import torch

from accumulation_harness.measure.ablation import REMOVALS, attribute
from accumulation_harness.measure.trial import accumulated, permuted
from accumulation_harness.recipes.faults import clip_per_micro_batch, mean_of_means, short_window_divided_by_n
from tests.trials import setting_of, trial

FULL, SHORT = torch.arange(64), torch.arange(64, 92)


def right(recipe):
    return recipe


@pytest.mark.parametrize(
    ("settings", "change", "factor"),
    [
        ("norm=batch", right, "batch statistics"),
        ("workload.dropout=0.2", permuted, "dropout"),
        ("split=ragged", mean_of_means, "unequal lengths"),
        ("workload.data=text workload.model=transformer workload.depth=1 norm=layer", mean_of_means, "unequal lengths"),
        ("steps=60", short_window_divided_by_n, "unequal lengths"),
        ("clip_norm=0.05", clip_per_micro_batch, "clipping"),
        ("precision=bfloat16", right, "low precision"),
    ],
)
def test_removing_the_factor_closes_the_gap_and_removing_others_does_not(settings, change, factor):
    config = trial(settings, "accumulation_steps=[4]")
    recipe = permuted(config, 1) if change is permuted else change(accumulated(config, 4))
    by_factor = dict(attribute(setting_of(config), recipe, [FULL, SHORT]))
    assert set(by_factor) == set(REMOVALS)
    assert by_factor[factor] > 0.999
    assert all(share < 0.5 for name, share in by_factor.items() if name != factor), by_factor
