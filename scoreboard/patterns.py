"""Faults of scripts that no index of packages holds, in our own words: what they do, and their mended form."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from scoreboard import data


def _train(batch_size: int, accumulation_steps: int, divisor: int, averages: Any = None, *, late: bool = False) -> None:
    """With Adam; `averages(model)` is updated after every micro-batch, or where `late` once after each step."""
    inputs, labels = (part[:32] for part in data.images())
    model = data.model()
    stepped = torch.optim.Adam(model.parameters(), lr=1e-2)
    average = averages and averages(model)
    for _ in range(data.EPOCHS):
        for place, (rows, wanted) in enumerate(zip(inputs.split(batch_size), labels.split(batch_size), strict=True), 1):
            (functional.cross_entropy(model(rows), wanted) / divisor).backward()
            if place % accumulation_steps == 0:
                stepped.step()
                stepped.zero_grad()
            if average and (place % accumulation_steps == 0 or not late):
                average.update()


def summed(batch_size: int, accumulation_steps: int) -> None:
    """The pattern of modded-nanogpt on one card: micro-batches in place of ranks are added, not averaged; Adam; divisible."""
    _train(batch_size, accumulation_steps, 1)


def summed_divided(batch_size: int, accumulation_steps: int) -> None:
    """The pattern of modded-nanogpt on one card, divided by the number of micro-batches; Adam; divisible."""
    _train(batch_size, accumulation_steps, accumulation_steps)


def _average(model: torch.nn.Module) -> Any:
    from ema_pytorch import EMA

    return EMA(model, beta=0.9, update_after_step=0, update_every=1)


def averaged(batch_size: int, accumulation_steps: int) -> None:
    """`EMA.update()` of ema-pytorch after every micro-batch; divisible."""
    _train(batch_size, accumulation_steps, accumulation_steps, _average)


def averaged_by_step(batch_size: int, accumulation_steps: int) -> None:
    """`EMA.update()` of ema-pytorch after every optimizer step; divisible."""
    _train(batch_size, accumulation_steps, accumulation_steps, _average, late=True)
