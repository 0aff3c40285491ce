"""fastai `Learner` with the callbacks `GradientAccumulation` and `GradientClip`; its own optimizers, and one of torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from fastai.basics import SGD, Adam, CrossEntropyLossFlat, DataLoader, DataLoaders, Learner, OptimWrapper
from fastai.callback.training import GradientAccumulation, GradientClip

from scoreboard import data


class Rows:
    def __init__(self, count: int) -> None:
        self.inputs, self.labels = data.images()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[row], self.labels[row]


def _train(
    batch_size: int, accumulation_steps: int, rows: int, optimizer: Any, callbacks: Sequence[Any] = (), **settings: Any
) -> None:
    """Training loaders of fastai drop the last partial batch unless told otherwise: `drop_last` is its default here."""
    loaders = DataLoaders(DataLoader(Rows(rows), bs=batch_size, shuffle=False, drop_last=True), DataLoader(Rows(8), bs=8))
    accumulation = GradientAccumulation(n_acc=batch_size * accumulation_steps)
    learner = Learner(
        loaders,
        data.model(),
        loss_func=CrossEntropyLossFlat(),
        opt_func=optimizer,
        lr=0.1,
        cbs=[accumulation, *callbacks],
        **settings,
    )
    with learner.no_bar(), learner.no_logging():
        learner.fit(data.EPOCHS)


def sgd(batch_size: int, accumulation_steps: int) -> None:
    """fastai's SGD with momentum, divisible."""
    _train(batch_size, accumulation_steps, 32, partial(SGD, mom=0.9))


def adam(batch_size: int, accumulation_steps: int) -> None:
    """fastai's Adam, weight decay 0.1, divisible."""
    _train(batch_size, accumulation_steps, 32, Adam, wd=0.1)


def torch_clipped(batch_size: int, accumulation_steps: int) -> None:
    """torch's SGD, `GradientClip(0.3)`, divisible."""
    _train(batch_size, accumulation_steps, 32, partial(OptimWrapper, opt=torch.optim.SGD), [GradientClip(0.3)])


def remainder(batch_size: int, accumulation_steps: int) -> None:
    """fastai's SGD with momentum, a remainder."""
    _train(batch_size, accumulation_steps, 40, SGD)
