"""The factor whose removal closes the gap is the one that opened it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from accumulation_harness.config import Data, Model, Norm, Precision, Split, TrialConfig, WorkloadConfig
from accumulation_harness.measure.ablation import REMOVALS, Run, attribute, equal_lengths, freeze, gap
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.recipes.faults import (
    clip_per_micro_batch,
    low_precision_accumulator,
    mean_of_means,
    short_window_divided_by_n,
)
from accumulation_harness.recipes.micro_batch import Even
from accumulation_harness.recipes.recipe import Recipe
from accumulation_harness.trial import Permuted, full_batch, split_plan

FULL, SHORT = torch.arange(64), torch.arange(64, 92)
TEXT = WorkloadConfig(data=Data.text, model=Model.transformer, depth=1)


def shares(transform: Any = None, permuted: bool = False, **settings: Any) -> dict[str, float]:
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
def test_removing_the_factor_closes_the_gap_and_removing_others_does_not(found: Any, factor: str) -> None:
    by_factor = found()
    assert set(by_factor) == set(REMOVALS)
    assert by_factor[factor] > 0.999
    assert all(share < 0.5 for name, share in by_factor.items() if name != factor), by_factor


def test_a_fault_without_such_a_factor_is_attributed_to_none() -> None:
    assert max(shares(low_precision_accumulator).values()) < 0.5


def factor_of(times: float) -> Recipe:
    """Gradients `times` too large, by a normaliser that is too small."""
    right = Recipe(accumulation_steps=2, split=Even(4))
    return dataclasses.replace(right, normalise=lambda terms, num: [torch.stack(list(terms)).sum() / times] * len(terms))


def run_of(recipe: Recipe, ids: Tensor = FULL, **changes: Any) -> Run:
    return Run(**{"recipe": recipe, "ids": ids, "precision": Precision.float64, "clip_norm": None, **changes})


@pytest.mark.parametrize("times", [1.0, 1.25, 2.0])
def test_the_gap_is_relative_to_the_float64_full_batch(toy_setting, times: float) -> None:
    """||times g - g|| / ||g|| = times - 1; clipped below both norms nothing of it is left."""
    setting = toy_setting(TrialConfig(effective_batch=8, accumulation_steps=(2,)))
    run = run_of(factor_of(times), torch.arange(8))
    assert gap(setting, run) == pytest.approx(times - 1, abs=1e-14)
    assert gap(setting, dataclasses.replace(run, clip_norm=1e-2)) < 1e-3


def test_the_widest_window_is_taken_and_none_without_a_step(toy_setting) -> None:
    """The fault acts in the second window alone; where the optimizer never steps, nothing can be attributed."""
    setting = toy_setting(TrialConfig(effective_batch=8, accumulation_steps=(2,), precision=Precision.float64))
    wrong = dataclasses.replace(
        factor_of(1.0), normalise=lambda terms, num: [sum(terms) / (3 if sum(terms) > 15 else 1)] * len(terms)
    )
    few, many = torch.tensor([0, 4, 8, 12, 16, 20, 1, 5]), torch.tensor([3, 7, 11, 15, 19, 23, 2, 6])  # 10 and 30 loss terms
    assert gap(setting, run_of(wrong, few)) < 1e-14 < 1 < gap(setting, run_of(wrong, many))
    found = attribute(setting, wrong, [few, many])
    assert found["low precision"] == pytest.approx(0, abs=1e-9) and set(found) == set(REMOVALS)
    assert attribute(setting, dataclasses.replace(wrong, at_boundary=()), [few, many]) == {}


def test_equal_lengths_fill_a_window_with_samples_of_one_length() -> None:
    setting = Setting(TrialConfig(workload=TEXT, norm=Norm.layer, accumulation_steps=(4,)), torch.device("cpu"))
    run = equal_lengths(setting, run_of(Recipe(accumulation_steps=4, split=Even(16)), SHORT))
    terms = setting.exact.num_terms(setting.exact.batch(run.ids))
    assert len(terms.unique()) == 1 < len(setting.exact.num_terms(setting.exact.batch(SHORT)).unique())
    assert run.recipe.split(len(run.ids)) == [len(run.ids) // 4] * 4 and len(run.ids.unique()) == len(run.ids)


def test_freezing_touches_batch_norm_alone() -> None:
    model = Setting(TrialConfig(norm=Norm.batch, workload=WorkloadConfig(dropout=0.1)), torch.device("cpu")).initial
    freeze(model)
    assert {type(layer).__name__ for layer in model.modules() if not layer.training} == {"BatchNorm2d"}
