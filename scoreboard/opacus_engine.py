"""Opacus' `PrivacyEngine`: micro-batches by `BatchMemoryManager`, and by backwards added up before one step."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scoreboard import data

warnings.simplefilter("ignore")


def _private(rows: int, batch_size: int, noise: float = 0.0, mode: str = "hooks") -> Any:
    """Model, optimizer, criterion and batches: rows clipped to a norm of 0.5 each, in their natural order."""
    inputs, labels = data.images()
    model, criterion = data.model(), nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(inputs[:rows], labels[:rows]), batch_size)
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=loader,
        criterion=criterion,
        noise_multiplier=noise,
        max_grad_norm=0.5,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    model, optimizer, *given, batches = made
    return model, optimizer, given[0] if given else criterion, batches


def _managed(rows: int, batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    model, optimizer, criterion, batches = _private(rows, batch_size * accumulation_steps, **settings)
    for _ in range(data.EPOCHS):
        with BatchMemoryManager(data_loader=batches, max_physical_batch_size=batch_size, optimizer=optimizer) as parts:
            for x, y in parts:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()


def managed(batch_size: int, accumulation_steps: int) -> None:
    """`BatchMemoryManager`, rows clipped at 0.5, no noise, a remainder."""
    _managed(40, batch_size, accumulation_steps)


def managed_noise(batch_size: int, accumulation_steps: int) -> None:
    """`BatchMemoryManager`, noise multiplier 1, a remainder."""
    _managed(40, batch_size, accumulation_steps, noise=1.0)


def managed_ghost(batch_size: int, accumulation_steps: int) -> None:
    """`BatchMemoryManager` with ghost clipping, no noise, a remainder."""
    _managed(40, batch_size, accumulation_steps, mode="ghost")


def _added(rows: int, batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    model, optimizer, criterion, batches = _private(rows, batch_size, **settings)
    for _ in range(data.EPOCHS):
        for place, (x, y) in enumerate(batches, 1):
            criterion(model(x), y).backward()
            if place % accumulation_steps == 0 or place == len(batches):
                optimizer.step()
                optimizer.zero_grad()


def added(batch_size: int, accumulation_steps: int) -> None:
    """N backwards before one step, divisible."""
    _added(32, batch_size, accumulation_steps)


def added_remainder(batch_size: int, accumulation_steps: int) -> None:
    """N backwards before one step, a remainder."""
    _added(40, batch_size, accumulation_steps)


def added_ghost(batch_size: int, accumulation_steps: int) -> None:
    """N backwards before one step with ghost clipping, divisible."""
    _added(32, batch_size, accumulation_steps, mode="ghost")
