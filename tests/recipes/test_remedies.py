"""Remedies as arms that train: short windows, unequal micro-batches, and what must not be silently wrong."""

import copy

import pytest
import torch
from torch import nn

from accumulation_harness.measure.trial import accumulated, full_batch
from accumulation_harness.recipes.recipe import take_step
from accumulation_harness.recipes.remedies import REMEDIES, calibrate
from accumulation_harness.referee.gradients import flatten, relative_distance
from tests.slow import slow
from tests.trials import setting_of, trial

CONFIG = trial(
    "norm=batch precision=float64 effective_batch=24 accumulation_steps=[3] split=ragged optimizer.name=adam optimizer.lr=0.01"
)
SAME = 1e-9  # relative, after three steps of Adam whose gradients agree to 1e-15


def trained(config, recipe):
    """Three windows, the second of them short."""
    arm = setting_of(config).arm(recipe, steps=3)
    for ids in torch.arange(24 + 13 + 24).split([24, 13, 24]):
        take_step(arm, arm.workload.batch(ids))
    return arm


def parameters(arm):
    return flatten(arm.model.parameters())


def right(config=CONFIG):
    return accumulated(config, 3)


@pytest.mark.parametrize(("model", "width"), [("conv", 8), ("mlp", 4), slow("resnet18", 1)])
def test_two_pass_statistics_train_as_the_full_batch_does(model, width):
    """Its weights and running statistics, through as many layers as there are; neither plain nor constant statistics do."""
    config = trial(f"workload.model={model} workload.width={width}", base=CONFIG)
    full, own = trained(config, full_batch(config)), trained(config, REMEDIES["two_pass_statistics"](right()))
    assert relative_distance(parameters(own), parameters(full)) < SAME
    for name, value in full.model.state_dict().items():
        assert torch.allclose(own.model.state_dict()[name], value, rtol=SAME, atol=SAME), name
    for other in (right(), REMEDIES["detached_statistics"](right())):
        assert relative_distance(parameters(trained(config, other)), parameters(full)) > 1e-3


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_two_pass_statistics_under_other_precisions(precision):
    """Loss scaling and autocast reach the passes too: the distance stays that of rounding."""
    config = trial(f"precision={precision} optimizer.name=sgd", base=CONFIG)
    full, own = trained(config, full_batch(config)), trained(config, REMEDIES["two_pass_statistics"](right(config)))
    plain = relative_distance(parameters(trained(config, right(config))), parameters(full))
    assert relative_distance(parameters(own), parameters(full)) < plain / 3


def test_ghost_full_batch_trains_as_accumulation_does():
    own, plain = trained(CONFIG, REMEDIES["ghost_full_batch"](right())), trained(CONFIG, right())
    assert relative_distance(parameters(own), parameters(plain)) < SAME
    assert len(own.seen) == 1 and len(plain.seen) == 3


def test_frozen_statistics_stay_those_of_the_first_window():
    arm = trained(CONFIG, REMEDIES["frozen_statistics"](right()))
    fresh = setting_of(CONFIG).arm(right(), steps=1)
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
