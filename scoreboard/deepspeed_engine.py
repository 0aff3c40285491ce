"""DeepSpeed's engine on a CPU: plain, with its clipping, ZeRO 1 to 3, unequal lengths, a remainder, Muon.

Functions with `two_ranks` in their names are for `--processes 2`; the others for one rank.

Its communication operator is not compiled: `deepspeed.initialize` builds it (minutes), and waits for ever where an earlier build
was killed and left its lock in ~/.cache/torch_extensions.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from torch.nn import functional

from scoreboard import data

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import deepspeed.ops

deepspeed.ops.__compatible_ops__.clear()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.setLevel("ERROR")


def _alone() -> None:
    """The one rank of a group, as a launcher would set it, unless there is a group."""
    if torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    for key, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        os.environ.setdefault(key, str(value))


def _batches(rows: Any, batch_size: int) -> Any:
    """The micro-batches of this rank."""
    sampler = torch.utils.data.DistributedSampler(rows, shuffle=False) if torch.distributed.get_world_size() > 1 else None
    return torch.utils.data.DataLoader(rows, batch_size=batch_size, sampler=sampler)


def _train(model: torch.nn.Module, loss: Any, rows: Any, batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    _alone()
    config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "zero_allow_untested_optimizer": True,
        **settings,
    }
    optimizer = None if "optimizer" in settings else torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, model_parameters=model.parameters())
    for _ in range(data.EPOCHS):
        for batch in _batches(rows, batch_size):
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
    """SGD, mean loss, divisible."""
    _images(32, batch_size, accumulation_steps)


def clipped(batch_size: int, accumulation_steps: int) -> None:
    """SGD, `gradient_clipping` 0.3, divisible."""
    _images(32, batch_size, accumulation_steps, gradient_clipping=0.3)


def zero_1(batch_size: int, accumulation_steps: int) -> None:
    """ZeRO stage 1, divisible."""
    _images(32, batch_size, accumulation_steps, zero_optimization={"stage": 1})


def zero_2(batch_size: int, accumulation_steps: int) -> None:
    """ZeRO stage 2, divisible."""
    _images(32, batch_size, accumulation_steps, zero_optimization={"stage": 2})


def remainder(batch_size: int, accumulation_steps: int) -> None:
    """SGD, mean loss, a remainder."""
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


def offloaded(batch_size: int, accumulation_steps: int) -> None:
    """ZeRO stage 2 with the optimizer offloaded to the CPU, divisible."""
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    _images(32, batch_size, accumulation_steps, zero_optimization=offload, zero_force_ds_cpu_optimizer=False)


def zero_3(batch_size: int, accumulation_steps: int) -> None:
    """ZeRO stage 3, divisible."""
    _images(32, batch_size, accumulation_steps, zero_optimization={"stage": 3})


def two_ranks_zero_2(batch_size: int, accumulation_steps: int) -> None:
    """ZeRO stage 2 on two ranks, divisible."""
    _images(32, batch_size, accumulation_steps, zero_optimization={"stage": 2})


def two_ranks_zero_3(batch_size: int, accumulation_steps: int) -> None:
    """ZeRO stage 3 on two ranks, divisible."""
    _images(32, batch_size, accumulation_steps, zero_optimization={"stage": 3})


MUON = {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "ns_method": "standard"}}


def muon_zero_2(batch_size: int, accumulation_steps: int) -> None:
    """Muon under ZeRO stage 2, divisible."""
    sharded = {"stage": 2, "reduce_scatter": False}
    _images(32, batch_size, accumulation_steps, zero_optimization=sharded, optimizer=MUON)


def muon_zero_3(batch_size: int, accumulation_steps: int) -> None:
    """Muon under ZeRO stage 3, divisible."""
    sharded = {"stage": 3, "reduce_scatter": False}
    _images(32, batch_size, accumulation_steps, zero_optimization=sharded, optimizer=MUON)
