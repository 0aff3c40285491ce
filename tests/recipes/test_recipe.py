"""The gradient that the loop under test gives to its optimizer, against numpy."""

import numpy as np
import pytest
import torch

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
