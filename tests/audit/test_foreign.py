"""Optimizers that are not torch's: one with the interface of fastai's, under the name by which the audit looks for it."""

import sys
from collections import defaultdict
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from accumulation_harness.audit import audit
from scoreboard import data


class Optimizer:
    """As `fastai.optimizer.Optimizer`: lists of parameters, hyper-parameters per list, state per parameter. SGD with momentum."""

    def __init__(self, parameters, lr):
        self.param_lists = [list(parameters)]
        self.hypers = [{"lr": lr, "mom": 0.9}]
        self.state: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)

    @torch.no_grad()
    def step(self):
        for p in self.param_lists[0]:
            assert p.grad is not None
            average = self.state[p].get("grad_avg", torch.zeros_like(p)) * self.hypers[0]["mom"] + p.grad
            self.state[p] = {"grad_avg": average}
            p -= self.hypers[0]["lr"] * average

    def zero_grad(self):
        for p in self.param_lists[0]:
            p.grad = None


@pytest.fixture(autouse=True)
def fastai(monkeypatch):
    module = ModuleType("fastai.optimizer")
    module.Optimizer = Optimizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastai.optimizer", module)
    step = Optimizer.step
    yield
    assert Optimizer.step is step


def _train(batch_size, accumulation_steps, factor):
    x, y = data.images()
    model = data.model()
    optimizer = Optimizer(model.parameters(), 0.1)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (functional.cross_entropy(model(x[ids]), y[ids], reduction="sum") / len(window) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()


def right(batch_size, accumulation_steps):
    _train(batch_size, accumulation_steps, 1.0)


def not_divided(batch_size, accumulation_steps):
    _train(batch_size, accumulation_steps, accumulation_steps)


def test_an_optimizer_of_fastai_is_seen():
    report = audit(right, batch_size=16, accumulation_steps=(4,))
    assert report.equivalent and not report.problems, str(report)
    (facts,) = report.results[0].facts
    assert facts.run.mine.steps == 6 and facts.run.mine.lrs[0] == (0.1,) and facts.run.mine.backwards[0] == 4


def test_its_gradients_tell_a_fault():
    report = audit(not_divided, batch_size=16, accumulation_steps=(4,))
    assert [f.cause for f in report.findings] == ["loss_not_divided"], str(report)
