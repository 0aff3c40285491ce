"""The setting of a trial whose workload is `tests/toy.py`, and the same in numpy."""

import numpy as np
import pytest
import torch

from accumulation_harness.measure import lock_step
from accumulation_harness.recipes.micro_batch import windows
from tests.reference import softmax_regression_gradients
from tests.toy import CPU, Toy


@pytest.fixture
def toy_setting(monkeypatch):
    """The setting of a trial whose workload is `Toy`, or another."""

    def make(config, toy=Toy):
        monkeypatch.setattr(lock_step, "make_workload", lambda config, *, device, dtype: toy(dtype))
        return lock_step.Setting(config, CPU)

    return make


class Numpy:
    """The toy in numpy: windows of ids, the start, and gradients of mean losses at any weights."""

    def __init__(self, setting):
        toy = Toy()
        self.x, self.y = toy.x.numpy(), toy.y.numpy()
        self.start = torch.cat([p.detach().reshape(-1) for p in setting.initial.double().parameters()]).numpy().copy()
        self.config = setting.config

    def windows(self):
        stream = windows(24, self.config.effective_batch, self.config.seed, self.config.data.last_window)
        return [next(stream).numpy() for _ in range(self.config.steps)]

    def gradient(self, theta, ids):
        """Of the mean over loss terms: sample i has 1 + i % 4 of them."""
        terms = 1 + ids % 4
        each = softmax_regression_gradients(theta[:15].reshape(3, 5), theta[15:], self.x[ids], self.y[ids])
        return (terms[:, None] * each).sum(0) / terms.sum()

    def loss(self, theta, ids):
        """The mean over loss terms."""
        logits = self.x[ids] @ theta[:15].reshape(3, 5).T + theta[15:]
        top = logits.max(1)
        losses = np.log(np.exp(logits - top[:, None]).sum(1)) + top - logits[np.arange(len(ids)), self.y[ids]]
        terms = 1 + ids % 4
        return float((terms * losses).sum() / terms.sum())
