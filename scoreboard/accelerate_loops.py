"""accelerate: the naive use of `accumulate()`, the documented recipe for unequal tokens, and it without its factor."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from scoreboard import data


def _forget() -> None:
    """`accelerate` keeps process-wide state, which must not pass from one call to the next."""
    from accelerate.state import AcceleratorState, GradientState

    if hasattr(GradientState, "_reset_state"):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    else:  # before 0.17
        AcceleratorState._shared_state.clear()
        GradientState._shared_state.clear()


def _prepared(batch_size: int, accumulation_steps: int, **plugin: Any) -> tuple[Accelerator, Any, Any, Any]:
    from accelerate.utils import GradientAccumulationPlugin

    _forget()
    made = GradientAccumulationPlugin(num_steps=accumulation_steps, **plugin)
    accelerator = Accelerator(gradient_accumulation_plugin=made, cpu=True)
    model = data.language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(list(data.sentences()), batch_size=batch_size, shuffle=False)  # type: ignore[arg-type, var-annotated]
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def naive(batch_size: int, accumulation_steps: int) -> None:
    """Mean loss of each micro-batch inside `accumulate()`, which divides by N; unequal tokens, a short last window."""
    accelerator, model, optimizer, loader = _prepared(batch_size, accumulation_steps)
    for _ in range(data.EPOCHS):
        for rows in loader:
            with accelerator.accumulate(model):
                accelerator.backward(data.token_loss(model(rows), rows, "mean"))
                optimizer.step()
                optimizer.zero_grad()


class Decay(torch.optim.lr_scheduler._LRScheduler):
    """By a tenth at every step; a kind that releases before torch 2.0 know as a schedule, too."""

    def get_lr(self) -> list[float]:
        return [rate * 0.9**self.last_epoch for rate in self.base_lrs]


def scheduled(batch_size: int, accumulation_steps: int) -> None:
    """A prepared schedule that is stepped inside `accumulate()`, as the documentation has it; equal lengths, divisible."""
    _forget()
    _divisible(batch_size, Accelerator(gradient_accumulation_steps=accumulation_steps, cpu=True), Decay)


def synchronised(batch_size: int, accumulation_steps: int) -> None:
    """`sync_each_batch=True`; equal lengths, divisible."""
    from accelerate.utils import GradientAccumulationPlugin

    _forget()
    made = GradientAccumulationPlugin(num_steps=accumulation_steps, sync_each_batch=True)
    _divisible(batch_size, Accelerator(gradient_accumulation_plugin=made, cpu=True), torch.optim.lr_scheduler.ConstantLR)


def _divisible(batch_size: int, accelerator: Accelerator, scheduled: Any) -> None:
    inputs, labels = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = scheduled(optimizer)
    rows = torch.utils.data.TensorDataset(inputs[:32], labels[:32])
    loader = torch.utils.data.DataLoader(rows, batch_size=batch_size)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(data.EPOCHS):
        for features, classes in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(features), classes))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


def documented(batch_size: int, accumulation_steps: int) -> None:
    """The recipe for tokens: sum, divided by the tokens of the window, times N because `backward` divides by N."""
    accelerator, model, optimizer, loader = _prepared(batch_size, accumulation_steps)
    for _ in range(data.EPOCHS):
        batches = list(loader)
        for start in range(0, len(batches), accumulation_steps):
            window = batches[start : start + accumulation_steps]
            total = sum(data.num_targets(rows) for rows in window)
            for i, rows in enumerate(window):
                accelerator.gradient_state._set_sync_gradients(i == len(window) - 1)
                accelerator.backward(data.token_loss(model(rows), rows) / total * accumulation_steps)
            optimizer.step()
            optimizer.zero_grad()


def documented_without_factor(batch_size: int, accumulation_steps: int) -> None:
    """The recipe for tokens without the factor N: divided by the window's tokens, and by N in `backward`."""
    accelerator, model, optimizer, loader = _prepared(batch_size, accumulation_steps)
    for _ in range(data.EPOCHS):
        batches = list(loader)
        for start in range(0, len(batches), accumulation_steps):
            window = batches[start : start + accumulation_steps]
            total = sum(data.num_targets(rows) for rows in window)
            for i, rows in enumerate(window):
                accelerator.gradient_state._set_sync_gradients(i == len(window) - 1)
                accelerator.backward(data.token_loss(model(rows), rows) / total)
            optimizer.step()
            optimizer.zero_grad()
