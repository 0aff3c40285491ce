"""The loop under test against numpy: gradients, optimizer steps, clipping, schedule; and that wrong recipes are really wrong."""

import numpy as np
import pytest
import schedulefree
import torch
from torch.optim import Optimizer

from accumulation_harness.config import ConfigError, OptimizerConfig, OptimizerName, targets
from accumulation_harness.measure.lock_step import Watch
from accumulation_harness.recipes.micro_batch import Even, Ragged, SplitPlan
from accumulation_harness.recipes.recipe import make_optimizer, take_step
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


class Bare(Optimizer):
    """It does not call its base class."""

    def __init__(self, groups, lr):
        self.param_groups = groups


def without_decay(groups, lr, alpha=0.5):
    return torch.optim.RMSprop(groups, lr=lr, alpha=alpha)


def own(monkeypatch, make, **settings):
    monkeypatch.setattr(targets, "load", lambda field, target: make)
    config = OptimizerConfig(name=OptimizerName.custom, target="mine.py:Mine", lr=0.3, **settings)
    return make_optimizer(config, [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))])


def test_an_optimizer_of_ones_own_gets_what_it_takes(monkeypatch):
    for group in own(monkeypatch, torch.optim.Adagrad, weight_decay=0.1, args={"lr_decay": 0.2}).param_groups:
        assert (group["lr"], group["weight_decay"], group["lr_decay"]) == (0.3, 0.1, 0.2)
    assert own(monkeypatch, without_decay, args={"alpha": 0.25}).param_groups[1]["alpha"] == 0.25
    assert own(monkeypatch, schedulefree.SGDScheduleFree).param_groups[0]["train_mode"], "ready to step"


@pytest.mark.parametrize(
    ("make", "weight_decay", "message"),
    [
        (without_decay, 0.1, "optimizer.weight_decay=0.1: expected 0: Mine takes none"),
        (lambda groups, lr: [lr], 0.0, "optimizer.target=mine.py:Mine: expected a torch.optim.Optimizer, got list"),
        (Bare, 0.0, "optimizer.target=mine.py:Mine: expected an optimizer that has called torch.optim.Optimizer.__init__"),
        (lambda groups, lr: torch.optim.LBFGS(groups[0]["params"], lr=lr), 0.0, "this one asks for a closure"),
    ],
    ids=["no weight decay", "a list", "no hooks", "a closure"],
)
def test_what_cannot_train_an_arm_is_refused(monkeypatch, make, weight_decay, message):
    with pytest.raises(ConfigError) as refusal:
        own(monkeypatch, make, weight_decay=weight_decay)
    assert message in str(refusal.value)
