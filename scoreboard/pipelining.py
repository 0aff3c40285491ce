"""torch's `ScheduleGPipe` with several `schedule.step()` per optimizer step: one stage in one process, two parts per call."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

from scoreboard import data

PARTS = 2  # pipeline micro-batches per call of the schedule


def _train(batch_size: int, accumulation_steps: int, *, scale_grads: bool) -> None:
    """The losses are divided by what the schedule does not divide by, so that one call per step is right either way."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    inputs, labels = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    divisor = accumulation_steps * (1 if scale_grads else PARTS)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits, targets) / divisor

    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, PARTS, loss_fn=loss, scale_grads=scale_grads)
    for window in data.windows(batch_size * accumulation_steps, keep=False):
        for rows in window.split(batch_size):
            schedule.step(inputs[rows], target=labels[rows])
        optimizer.step()
        optimizer.zero_grad()


def scaled(batch_size: int, accumulation_steps: int) -> None:
    """`scale_grads=True` (the default), loss divided by N, divisible."""
    _train(batch_size, accumulation_steps, scale_grads=True)


def not_scaled(batch_size: int, accumulation_steps: int) -> None:
    """`scale_grads=False`, loss divided by all micro-batches, divisible."""
    _train(batch_size, accumulation_steps, scale_grads=False)
