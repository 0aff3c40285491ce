"""DeepSpeed's engine on one rank and a CPU: plain, with its clipping, ZeRO 1 and 2, unequal lengths, a remainder.

Its communication operator is not compiled: `deepspeed.initialize` builds it (minutes), and waits for ever where an earlier build
was killed and left its lock in ~/.cache/torch_extensions.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from torch.nn import functional

from experiments.trainers import data

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import deepspeed.ops

deepspeed.ops.__compatible_ops__.clear()
deepspeed.utils.logger.setLevel("ERROR")


def _alone() -> None:
    """The one rank of a group, as a launcher would set it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    for key, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        os.environ.setdefault(key, str(value))


def _train(model: torch.nn.Module, loss: Any, rows: Any, batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    _alone()
    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "zero_allow_untested_optimizer": True,
        **settings,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(data.EPOCHS):
        for batch in torch.utils.data.DataLoader(rows, batch_size=batch_size):
            engine.backward(loss(engine, batch))
            engine.step()
    engine.destroy()


def _images(rows: int, batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    inputs, labels = data.images()
    pairs = torch.utils.data.TensorDataset(inputs[:rows], labels[:rows])
    _train(
        data.model(),
        lambda model, b: functional.cross_entropy(model(b[0]), b[1]),
        pairs,
        batch_size,
        accumulation_steps,
        **settings,
    )


def divisible(batch_size: int, accumulation_steps: int) -> None:
    _images(32, batch_size, accumulation_steps)


def clipped(batch_size: int, accumulation_steps: int) -> None:
    """`gradient_clipping` 0.3, divisible."""
    _images(32, batch_size, accumulation_steps, gradient_clipping=0.3)


def zero_1(batch_size: int, accumulation_steps: int) -> None:
    """ZeRO stage 1, divisible."""
    _images(32, batch_size, accumulation_steps, zero_optimization={"stage": 1})


def zero_2(batch_size: int, accumulation_steps: int) -> None:
    """ZeRO stage 2, divisible."""
    _images(32, batch_size, accumulation_steps, zero_optimization={"stage": 2})


def remainder(batch_size: int, accumulation_steps: int) -> None:
    """40 rows: windows of 16 do not divide them."""
    _images(40, batch_size, accumulation_steps)


def _tokens(batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    rows: Any = data.sentences()[:32]
    model = data.language_model()
    _train(model, lambda m, tokens: data.token_loss(m(tokens), tokens, "mean"), rows, batch_size, accumulation_steps, **settings)


def unequal(batch_size: int, accumulation_steps: int) -> None:
    """Mean loss over unequal lengths, divisible."""
    _tokens(batch_size, accumulation_steps)


def unequal_zero_2(batch_size: int, accumulation_steps: int) -> None:
    """Mean loss over unequal lengths, ZeRO stage 2, divisible."""
    _tokens(batch_size, accumulation_steps, zero_optimization={"stage": 2})
