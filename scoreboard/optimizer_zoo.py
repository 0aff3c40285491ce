"""Optimizers of pytorch_optimizer and schedulefree in a right loop: two-pass, averaging, with state of unusual form."""

from __future__ import annotations

import warnings
from typing import Any

import pytorch_optimizer
import schedulefree
import torch
from torch import Tensor, nn

from scoreboard import data

warnings.simplefilter("ignore")


def _backwards(model: nn.Module, window: Tensor, batch_size: int, divided_by: int) -> None:
    inputs, labels = data.images()
    for ids in window.split(batch_size):
        (nn.functional.cross_entropy(model(inputs[ids]), labels[ids], reduction="sum") / divided_by).backward()


def _train(made: Any, batch_size: int, accumulation_steps: int, *, divided: bool = True) -> None:
    model = data.model()
    optimizer = made(model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    for window in data.windows(batch_size * accumulation_steps):
        _backwards(model, window, batch_size, len(window) if divided else batch_size)
        optimizer.step()
        optimizer.zero_grad()


def schedule_free(batch_size: int, accumulation_steps: int) -> None:
    """`AdamWScheduleFree` of schedulefree, warmup, weight decay 0.1."""
    settings = {"lr": 0.01, "warmup_steps": 3, "weight_decay": 0.1}
    _train(lambda p: schedulefree.AdamWScheduleFree(p, **settings), batch_size, accumulation_steps)


def lookahead(batch_size: int, accumulation_steps: int) -> None:
    """`Lookahead`, k=2, around SGD with momentum."""
    _train(
        lambda p: pytorch_optimizer.Lookahead(torch.optim.SGD(p, lr=0.1, momentum=0.9), k=2),
        batch_size,
        accumulation_steps,
    )


def sharpness_aware(batch_size: int, accumulation_steps: int) -> None:
    """`SAM` around SGD: both passes over the whole window."""
    model = data.model()
    optimizer = pytorch_optimizer.SAM(model.parameters(), torch.optim.SGD, lr=0.1, rho=0.05)
    for window in data.windows(batch_size * accumulation_steps):
        _backwards(model, window, batch_size, len(window))
        optimizer.first_step(zero_grad=True)
        _backwards(model, window, batch_size, len(window))
        optimizer.second_step(zero_grad=True)


def lion(batch_size: int, accumulation_steps: int) -> None:
    """`Lion`: signs of the gradients, weight decay 0.1."""
    _train(lambda p: pytorch_optimizer.Lion(p, lr=1e-3, weight_decay=0.1), batch_size, accumulation_steps)


def lion_not_divided(batch_size: int, accumulation_steps: int) -> None:
    """`Lion`, the micro-batches' means added."""
    _train(lambda p: pytorch_optimizer.Lion(p, lr=1e-3), batch_size, accumulation_steps, divided=False)


def madgrad(batch_size: int, accumulation_steps: int) -> None:
    """`MADGRAD`, which keeps a plain number among the states."""
    _train(lambda p: pytorch_optimizer.MADGRAD(p, lr=1e-2), batch_size, accumulation_steps)


def soap(batch_size: int, accumulation_steps: int) -> None:
    """`SOAP`: Adam in the eigenvectors of the gradients' covariance."""
    _train(lambda p: pytorch_optimizer.SOAP(p), batch_size, accumulation_steps)


def soap_not_divided(batch_size: int, accumulation_steps: int) -> None:
    """`SOAP`, the micro-batches' means added."""
    _train(lambda p: pytorch_optimizer.SOAP(p), batch_size, accumulation_steps, divided=False)
