"""A window with a micro-batch that is not finite: skipped once, or not finite for everybody; a fault steps on the rest."""

import dataclasses
import itertools
import math

import pytest
import torch

from accumulation_harness.config import (
    Data,
    Model,
    Norm,
    OptimizerConfig,
    OptimizerName,
    Precision,
    Split,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.config.arm_name import PERMUTED
from accumulation_harness.measure.lock_step import REFERENCE, Setting
from accumulation_harness.measure.poison import differing, measure
from accumulation_harness.measure.trial import full_batch, permuted, split_plan
from accumulation_harness.recipes.faults import non_finite_micro_batch
from accumulation_harness.recipes.micro_batch import windows
from accumulation_harness.recipes.recipe import Recipe

ADAM = OptimizerConfig(name=OptimizerName.adam, lr=1e-3)
TEXT = WorkloadConfig(data=Data.text, model=Model.transformer, depth=1)


def probe(transform=None, **settings):
    config = TrialConfig(accumulation_steps=(5,), effective_batch=30, **{"split": Split.ragged, "optimizer": ADAM, **settings})
    right = Recipe(accumulation_steps=5, split=split_plan(config, 5))
    recipes = {REFERENCE: full_batch(config), PERMUTED: permuted(config, 0), "right": right}
    if transform is not None:
        recipes["wrong"] = transform(right)
    setting = Setting(config, torch.device("cpu"))
    stream = windows(setting.exact.num_samples, config.effective_batch, config.seed, config.data.last_window)
    return measure(setting, recipes, list(itertools.islice(stream, 2)))


@pytest.mark.parametrize("settings", [{}, {"norm": Norm.batch}, {"workload": TEXT, "norm": Norm.layer}], ids=str)
def test_with_a_scaler_every_right_arm_skips_once_and_halves_once(settings):
    for label, found in probe(precision=Precision.float16, **settings).items():
        assert (found.steps, found.finite, found.moved, found.survivors) == (0, True, False, math.inf), label
        assert (found.scale_before, found.scale_after) == (4096.0, 2048.0)


def test_without_a_scaler_every_right_arm_is_lost():
    found = probe()
    assert all((one.steps, one.finite, one.moved, one.survivors) == (1, False, True, math.inf) for one in found.values())
    assert not differing(found, "right") and not differing(found, PERMUTED)


@pytest.mark.parametrize("precision", [Precision.float16, Precision.float32])
@pytest.mark.parametrize("norm", [Norm.none, Norm.batch])
def test_dropping_the_micro_batch_shows_and_the_rest_is_recognised(precision, norm):
    found = probe(non_finite_micro_batch, precision=precision, norm=norm)
    assert found["wrong"].steps == 1 and found["wrong"].finite and found["wrong"].moved
    assert found["wrong"].survivors < 1e-14
    assert differing(found, "wrong") and not differing(found, "right")


def test_a_step_on_something_else_is_not_taken_for_the_survivors():
    def zeros_for_nans(recipe):
        def patch(arm):
            for p in arm.model.parameters():
                if p.grad is not None:
                    p.grad.nan_to_num_(0.0, 1.0, -1.0).add_(1e-3)

        return dataclasses.replace(recipe, at_boundary=(patch, *recipe.at_boundary))

    wrong = probe(zeros_for_nans)["wrong"]
    assert wrong.finite and wrong.survivors > 1e-3
