"""The loop under test against numpy: gradients, optimizer steps, clipping, schedule; and that wrong recipes are really wrong."""

import numpy as np
import pytest
import torch

from accumulation_harness.config import OptimizerConfig, OptimizerName
from accumulation_harness.measure.lock_step import Watch
from accumulation_harness.recipes.micro_batch import Even, Ragged, SplitPlan
from accumulation_harness.recipes.recipe import take_step
from tests import reference
from tests.toy import Toy, make_arm

EXACT = 1e-14  # float64, sums of 24 terms
WINDOW = torch.arange(24)
SPLITS: list[SplitPlan] = [Even(24), Even(12), Even(7), Even(1), Ragged(3, 24), Ragged(24, 24)]


def numpy_gradient(weights, bias, ids=WINDOW):
    toy = Toy()
    each = reference.softmax_regression_gradients(weights, bias, toy.x[ids].numpy(), toy.y[ids].numpy())
    terms = 1 + ids.numpy() % 4
    gradient: reference.Array = (terms[:, None] * each).sum(0) / terms.sum()
    return gradient


def parameters(arm):
    model = arm.model  # type: ignore[attr-defined]
    return model.weight.detach().double().numpy().copy(), model.bias.detach().double().numpy().copy()


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("ids", [WINDOW, torch.arange(11)], ids=["full", "short"])
def test_the_consumed_gradient_is_the_windows_mean_gradient(split, ids):
    arm = make_arm(split)
    expected = numpy_gradient(*parameters(arm), ids)
    watch = Watch(arm)
    take_step(arm, arm.workload.batch(ids))
    assert watch.gradient is not None and watch.steps == 1
    assert np.linalg.norm(watch.gradient.numpy() - expected) <= EXACT * np.linalg.norm(expected)


OPTIMIZERS = {
    OptimizerName.sgd: lambda t, g: reference.sgd(t, g, 0.1),
    OptimizerName.momentum: lambda t, g: reference.sgd(t, g, 0.1, 0.9),
    OptimizerName.nesterov: lambda t, g: reference.sgd(t, g, 0.1, 0.9, nesterov=True),
    OptimizerName.adam: lambda t, g: reference.adam(t, g, 0.1, 0.9, 0.999, 1e-8),
    OptimizerName.adamw: lambda t, g: reference.adam(t, g, 0.1, 0.9, 0.999, 1e-8, decay=0.3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accumulated_steps_are_the_textbook_optimizers(name):
    decay = 0.3 if name == OptimizerName.adamw else 0.0
    arm = make_arm(Even(7), optimizer=OptimizerConfig(name=name, weight_decay=decay))
    start, gradients = np.concatenate([p.ravel() for p in parameters(arm)]), []
    for _ in range(5):
        gradients.append(numpy_gradient(*parameters(arm)))
        take_step(arm, arm.workload.batch(WINDOW))
    expected = OPTIMIZERS[name](start, gradients)
    found = np.concatenate([p.ravel() for p in parameters(arm)])
    assert np.abs(found - expected).max() < 1e-12
    assert np.abs(found - start).max() > 0.01, "the arm must have moved"


def test_clipping_acts_once_on_the_accumulated_gradient():
    arm = make_arm(Even(7), clip_norm=0.05)
    expected = numpy_gradient(*parameters(arm))
    watch = Watch(arm)
    take_step(arm, arm.workload.batch(WINDOW))
    assert watch.gradient is not None and bool(arm.clipped[0])
    norm = np.linalg.norm(expected)
    assert np.abs(watch.gradient.numpy() - expected * 0.05 / (norm + 1e-6)).max() < EXACT
