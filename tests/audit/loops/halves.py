"""Two layers with losses of their own, in one process or each on a rank: no rank speaks to another."""

import torch
from torch import nn
from torch.nn import functional

from scoreboard import data
from tests.audit.loops.frame import At, X, full_windows, sgd

HELD = ("1", "0")  # layer of each rank: not in the order of the model


def _model():
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(data.FEATURES, 3) for name in ("0", "1")})


class _Part(nn.Module):
    """Some of the layers, under the names that they have in the model."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        for name, layer in _model().items():
            if name in names:
                self.add_module(name, layer)

    def forward(self, rows):
        outputs = [functional.softplus(self.get_submodule(name)(rows)).mean(1) for name in self.names]
        return torch.stack(outputs).sum(0)


def train(names, batch_size, accumulation_steps, divisor):
    """Train these layers with SGD."""
    model = _Part(names)
    for _, parts in At(batch_size, accumulation_steps, model, sgd(model)).windows(full_windows):
        for ids in parts:
            (model(X[ids]).mean() / divisor).backward()


def whole(batch_size, accumulation_steps):
    """Both layers, in one process."""
    train(("0", "1"), batch_size, accumulation_steps, accumulation_steps)


def first_rank(batch_size, accumulation_steps):
    """The part of rank 0."""
    train(HELD[:1], batch_size, accumulation_steps, accumulation_steps)


def second_rank(batch_size, accumulation_steps):
    """The part of rank 1."""
    train(HELD[1:], batch_size, accumulation_steps, accumulation_steps)


def second_rank_not_divided(batch_size, accumulation_steps):
    """The part of rank 1, where the mean losses of the micro-batches are added."""
    train(HELD[1:], batch_size, accumulation_steps, 1)


def second_rank_raises(batch_size, accumulation_steps):
    """The part of rank 1, which ends where it is accumulated."""
    if accumulation_steps > 1:
        raise RuntimeError("only here")
    second_rank(batch_size, accumulation_steps)
