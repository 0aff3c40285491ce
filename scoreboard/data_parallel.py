"""torch's `DistributedDataParallel` on two gloo ranks: `no_sync()` and `static_graph=True`, apart and together."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from scoreboard import data


def _train(batch_size: int, accumulation_steps: int, *, unsynchronised: bool, warmed: bool = False, **settings: Any) -> None:
    """Each rank takes every second row; all micro-batches but the last may be `unsynchronised`."""
    inputs, labels = data.images()
    model = DistributedDataParallel(data.model(), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if warmed:
        functional.cross_entropy(model(inputs[:4]), labels[:4]).backward()
        optimizer.zero_grad()
    for window in torch.arange(32).split(batch_size * accumulation_steps * dist.get_world_size()) * data.EPOCHS:
        parts = window[dist.get_rank() :: dist.get_world_size()].split(batch_size)
        for place, rows in enumerate(parts, 1):
            with model.no_sync() if unsynchronised and place < len(parts) else nullcontext():
                (functional.cross_entropy(model(inputs[rows]), labels[rows]) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()


def no_sync(batch_size: int, accumulation_steps: int) -> None:
    """`no_sync()` around all micro-batches but the last, divisible."""
    _train(batch_size, accumulation_steps, unsynchronised=True)


def static_graph(batch_size: int, accumulation_steps: int) -> None:
    """`static_graph=True`, ranks synchronise after every micro-batch, divisible."""
    _train(batch_size, accumulation_steps, unsynchronised=False, static_graph=True)


def static_graph_no_sync(batch_size: int, accumulation_steps: int) -> None:
    """`static_graph=True` and `no_sync()` around all micro-batches but the last, divisible."""
    _train(batch_size, accumulation_steps, unsynchronised=True, static_graph=True)


def static_graph_no_sync_later(batch_size: int, accumulation_steps: int) -> None:
    """`static_graph=True` and `no_sync()`, after one backward that synchronises, whose gradients are thrown away."""
    _train(batch_size, accumulation_steps, unsynchronised=True, warmed=True, static_graph=True)
