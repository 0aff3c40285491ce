"""Optimizers that are not torch's: with the interfaces of fastai's and Keras', under the names by which the audit finds them."""

import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import pytest
import torch

from accumulation_harness.audit.observe.adapters import KERAS, KERAS_BASE
from scoreboard import data
from tests.audit.asked import audited, named
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, full_windows


class Optimizer:
    """As `fastai.optimizer.Optimizer`: lists of parameters, hyper-parameters per list, state per parameter. SGD with momentum."""

    def __init__(self, parameters, lr):
        self.param_lists = [list(parameters)]
        self.hypers = [{"lr": lr, "mom": 0.9}]
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self):
        for p in self.param_lists[0]:
            average = self.state[p].get("grad_avg", torch.zeros_like(p)) * self.hypers[0]["mom"] + p.grad
            self.state[p] = {"grad_avg": average}
            p -= self.hypers[0]["lr"] * average

    def zero_grad(self):
        for p in self.param_lists[0]:
            p.grad = None


@pytest.fixture
def fastai(monkeypatch):
    module = ModuleType("fastai.optimizer")
    module.Optimizer = Optimizer
    monkeypatch.setitem(sys.modules, "fastai.optimizer", module)
    step = Optimizer.step
    yield
    assert Optimizer.step is step


@frame.loop(optimizer=lambda model: Optimizer(model.parameters(), 0.1))
def right(at):
    return {}


@frame.loop("loss_not_divided", optimizer=lambda model: Optimizer(model.parameters(), 0.1))
def not_divided(at):
    return {"loss": frame.divided(frame.mean_over_window, 1 / at.n)}


@pytest.mark.usefixtures("fastai")
def test_an_optimizer_of_fastai_is_seen():
    report = named(right)
    (facts,) = report.results[0].facts
    held = facts.run.reference.run.held
    assert held.role("optimizer.state") == "state" and held.role("optimizer") == "optimizer", held.roles
    assert facts.run.mine.steps == 6 and facts.run.mine.lrs[0] == (0.1,) and facts.run.mine.backwards[0] == 4
    named(not_divided, "loss_not_divided")


class BaseOptimizer:
    """As `keras.optimizers.Optimizer`: built with its variables, then given gradients; it accumulates N of them by itself."""

    def __init__(self, accumulation_steps):
        self.accumulation_steps, self.built, self.seen = accumulation_steps, False, 0
        ALIVE.append(self)

    def build(self, variables):
        self.built, self._trainable_variables = True, variables
        self.sums = [torch.zeros_like(variable.value) for variable in variables]

    def apply(self, gradients):
        for total, gradient in zip(self.sums, gradients, strict=True):
            total += gradient / self.accumulation_steps
        self.seen += 1
        if self.seen % self.accumulation_steps == 0:
            self._backend_update_step([total.clone() for total in self.sums], self._trainable_variables, 0.1)
            for total in self.sums:
                total.zero_()


class TorchParallelOptimizer(BaseOptimizer):
    @torch.no_grad()
    def _backend_update_step(self, gradients, variables, learning_rate):
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.value -= learning_rate * gradient


ALIVE = []  # as a framework's global state: what a run has made stays


@pytest.fixture
def keras(monkeypatch):
    for name, kind in ((KERAS, TorchParallelOptimizer), (KERAS_BASE, BaseOptimizer)):
        module = ModuleType(name)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, name, module)
    ALIVE.clear()


def means_of_means(batch_size, accumulation_steps):
    """The optimizer is built in the first step, as Keras' are."""
    model = data.language_model()
    optimizer = TorchParallelOptimizer(accumulation_steps)
    for window in full_windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            model.zero_grad()
            loss = data.token_loss(model(TOKENS[ids]), TOKENS[ids], "mean")
            if not optimizer.built:
                optimizer.build([SimpleNamespace(value=p) for p in model.parameters()])
            loss.backward()
            optimizer.apply([p.grad for p in model.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.usefixtures("keras")
def test_what_an_earlier_audit_has_left_behind_changes_no_finding():
    first, second = [audited(means_of_means) for _ in range(2)]
    assert len(ALIVE) > 8
    assert first.to_json() == second.to_json()
    assert [(f.cause, f.optimizer_step) for f in second.findings] == [("mean_of_means", 0)], str(second)
