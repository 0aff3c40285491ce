"""accelerate's FSDP2 on two gloo ranks: `accumulate()`, clipping and unequal tokens.

accumulation-harness audit scoreboard/accelerate_sharded.py:equal --batch-size 8 --accumulation-steps 4 --processes 2
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from torch import Tensor
from torch.nn import functional

from scoreboard import data

Loss = Callable[[Any, Any], Tensor]


def _accelerator(accumulation_steps: int) -> Accelerator:
    """`accelerate` keeps process-wide state, which must not pass from one call to the next."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(dist.get_world_size()), ACCELERATE_USE_CPU="true")
    sharded = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
    accumulated = GradientAccumulationPlugin(num_steps=accumulation_steps)
    return Accelerator(fsdp_plugin=sharded, gradient_accumulation_plugin=accumulated, cpu=True)


def _train(model: Any, rows: Any, loss: Loss, batch_size: int, accumulation_steps: int, *, clip: float | None = None) -> None:
    accelerator = _accelerator(accumulation_steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=batch_size, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(data.EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()


def _labels(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _pairs(rows: int) -> Any:
    inputs, labels = data.images()
    return torch.utils.data.TensorDataset(torch.cat([inputs, inputs.flip(0)])[:rows], torch.cat([labels, labels.flip(0)])[:rows])


def equal(batch_size: int, accumulation_steps: int) -> None:
    """FSDP2, mean loss over rows, divisible."""
    _train(data.model(), _pairs(64), _labels, batch_size, accumulation_steps)


def clipped(batch_size: int, accumulation_steps: int) -> None:
    """FSDP2, `clip_grad_norm_(0.3)` at the end of each window, divisible."""
    _train(data.model(), _pairs(64), _labels, batch_size, accumulation_steps, clip=0.3)


def unequal(batch_size: int, accumulation_steps: int) -> None:
    """FSDP2, mean loss over unequal tokens, divisible."""

    def tokens(model: Any, rows: Tensor) -> Tensor:
        return data.token_loss(model(rows), rows, "mean")

    rows = torch.cat([data.sentences(), data.sentences().flip(0)])[:64]
    _train(data.language_model(), list(rows), tokens, batch_size, accumulation_steps)
