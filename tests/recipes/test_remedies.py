"""Remedies as arms that train: short windows, unequal micro-batches, and what must not be silently wrong."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from accumulation_harness.config import (
    Model,
    Norm,
    OptimizerConfig,
    OptimizerName,
    Precision,
    Split,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.trial import full_batch, split_plan
from accumulation_harness.recipes.determinism import choose_device
from accumulation_harness.recipes.recipe import Recipe, take_step
from accumulation_harness.recipes.remedies import REMEDIES, calibrate
from accumulation_harness.referee.gradients import flatten, relative_distance

CONFIG = TrialConfig(
    norm=Norm.batch, precision=Precision.float64, effective_batch=24, accumulation_steps=(3,), split=Split.ragged,
    optimizer=OptimizerConfig(name=OptimizerName.adam, lr=0.01),
)  # fmt: skip
SAME = 1e-9  # relative, after three steps of Adam whose gradients agree to 1e-15


def trained(config, recipe):
    """Three windows, the second of them short."""
    setting = Setting(config, choose_device(config.device))
    arm = setting.arm(recipe, steps=3)
    for ids in torch.arange(24 + 13 + 24).split([24, 13, 24]):
        take_step(arm, arm.workload.batch(ids))
    return arm


def parameters(arm):
    return flatten(arm.model.parameters())


def right(config=CONFIG):
    return Recipe(accumulation_steps=3, split=split_plan(config, 3))


@pytest.mark.parametrize(
    ("model", "width"), [(Model.conv, 8), (Model.mlp, 4), pytest.param(Model.resnet18, 1, marks=pytest.mark.slow)]
)
def test_two_pass_statistics_train_as_the_full_batch_does(model, width):
    """Its weights and running statistics, through as many layers as there are; neither plain nor constant statistics do."""
    config = dataclasses.replace(CONFIG, workload=WorkloadConfig(model=model, width=width))
    full, own = trained(config, full_batch(config)), trained(config, REMEDIES["two_pass_statistics"](right()))
    assert relative_distance(parameters(own), parameters(full)) < SAME
    for name, value in full.model.state_dict().items():
        assert torch.allclose(own.model.state_dict()[name], value, rtol=SAME, atol=SAME), name
    for other in (right(), REMEDIES["detached_statistics"](right())):
        assert relative_distance(parameters(trained(config, other)), parameters(full)) > 1e-3


@pytest.mark.parametrize("precision", [Precision.float32, Precision.float16, Precision.bfloat16])
def test_two_pass_statistics_under_other_precisions(precision):
    """Loss scaling and autocast reach the passes too: the distance stays that of rounding."""
    config = dataclasses.replace(CONFIG, precision=precision, optimizer=OptimizerConfig(lr=0.01))
    full, own = trained(config, full_batch(config)), trained(config, REMEDIES["two_pass_statistics"](right(config)))
    plain = relative_distance(parameters(trained(config, right(config))), parameters(full))
    assert relative_distance(parameters(own), parameters(full)) < plain / 3


def test_ghost_full_batch_trains_as_accumulation_does():
    own, accumulated = trained(CONFIG, REMEDIES["ghost_full_batch"](right())), trained(CONFIG, right())
    assert relative_distance(parameters(own), parameters(accumulated)) < SAME
    assert len(own.seen) == 1 and len(accumulated.seen) == 3


def test_frozen_statistics_stay_those_of_the_first_window():
    arm = trained(CONFIG, REMEDIES["frozen_statistics"](right()))
    fresh = Setting(CONFIG, choose_device(CONFIG.device)).arm(right(), steps=1)
    reference = copy.deepcopy(fresh.model).train()
    for layer in reference.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # the average of one window is that window
    reference(arm.workload.batch(torch.arange(24)).inputs)
    for name, value in reference.named_buffers():
        if "running" in name:
            assert torch.allclose(arm.model.get_buffer(name), value, rtol=1e-12, atol=1e-12)
    calibrate(fresh, torch.arange(24))
    assert all(layer.momentum == 0.1 for layer in fresh.model.modules() if isinstance(layer, nn.BatchNorm2d))
