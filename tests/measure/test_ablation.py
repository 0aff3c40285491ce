"""The factor whose removal closes the gap is the one that opened it."""

import dataclasses

import pytest
import torch

from accumulation_harness.config import Data, Model, Norm, Precision, Split, TrialConfig, WorkloadConfig
from accumulation_harness.measure.ablation import REMOVALS, attribute
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.trial import Permuted, full_batch, split_plan
from accumulation_harness.recipes.faults import (
    clip_per_micro_batch,
    mean_of_means,
    short_window_divided_by_n,
)
from accumulation_harness.recipes.recipe import Recipe

FULL, SHORT = torch.arange(64), torch.arange(64, 92)
TEXT = WorkloadConfig(data=Data.text, model=Model.transformer, depth=1)


def shares(transform=None, permuted=False, **settings):
    config = TrialConfig(accumulation_steps=(4,), **settings)
    recipe = Recipe(accumulation_steps=4, split=split_plan(config, 4))
    if permuted:
        recipe = dataclasses.replace(full_batch(config), arrange=Permuted(1))
    recipe = recipe if transform is None else transform(recipe)
    return dict(attribute(Setting(config, torch.device("cpu")), recipe, [FULL, SHORT]))


@pytest.mark.parametrize(
    ("found", "factor"),
    [
        (lambda: shares(norm=Norm.batch), "batch statistics"),
        (lambda: shares(permuted=True, workload=WorkloadConfig(dropout=0.2)), "dropout"),
        (lambda: shares(mean_of_means, split=Split.ragged), "unequal lengths"),
        (lambda: shares(mean_of_means, workload=TEXT, norm=Norm.layer), "unequal lengths"),
        (lambda: shares(short_window_divided_by_n), "unequal lengths"),
        (lambda: shares(clip_per_micro_batch, clip_norm=0.05), "clipping"),
        (lambda: shares(precision=Precision.bfloat16), "low precision"),
    ],
    ids=["BatchNorm", "dropout", "ragged", "text", "short window", "clipping", "bfloat16"],
)
def test_removing_the_factor_closes_the_gap_and_removing_others_does_not(found, factor):
    by_factor = found()
    assert set(by_factor) == set(REMOVALS)
    assert by_factor[factor] > 0.999
    assert all(share < 0.5 for name, share in by_factor.items() if name != factor), by_factor
