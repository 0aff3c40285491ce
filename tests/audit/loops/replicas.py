"""DistributedDataParallel and FSDP2 on two ranks: right and wrong boundaries of synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import cross_entropy as ce
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from experiments.trainers import data


def _mine(window: Tensor) -> Tensor:
    """This rank's rows of a window over all ranks."""
    part: Tensor = window[dist.get_rank() :: dist.get_world_size()]
    return part


def _windows(batch_size: int, accumulation_steps: int) -> Any:
    return data.windows(batch_size * accumulation_steps * dist.get_world_size())


def ddp(batch_size: int, accumulation_steps: int) -> None:
    """`no_sync` on all micro-batches but the last; gradients are averaged over ranks, whose windows are equally long."""
    x, y = data.images()
    model = DistributedDataParallel(data.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for window in _windows(batch_size, accumulation_steps):
        parts = _mine(window).split(batch_size)
        for k, ids in enumerate(parts):
            with nullcontext() if k == len(parts) - 1 else model.no_sync():
                (ce(model(x[ids]), y[ids], reduction="sum") / len(_mine(window))).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def ddp_every_backward(batch_size: int, accumulation_steps: int) -> None:
    """Synchronised after every micro-batch: slower, and the same computation."""
    x, y = data.images()
    model = DistributedDataParallel(data.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in _windows(batch_size, accumulation_steps):
        for ids in _mine(window).split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(_mine(window))).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_never_synchronised(batch_size: int, accumulation_steps: int) -> None:
    """`no_sync` also on the last micro-batch, unless it is the only one."""
    x, y = data.images()
    model = DistributedDataParallel(data.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in _windows(batch_size, accumulation_steps):
        for ids in _mine(window).split(batch_size):
            with nullcontext() if accumulation_steps == 1 else model.no_sync():
                (ce(model(x[ids]), y[ids], reduction="sum") / len(_mine(window))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _fully_sharded(batch_size: int, accumulation_steps: int, *, one_tensor: bool, by_means: bool) -> None:
    """FSDP1, `no_sync` inside the window: the whole gradient is held until the last backward, which shares it out."""
    tokens = data.sentences()
    model = FullyShardedDataParallel(data.language_model(), device_id=torch.device("cpu"), use_orig_params=not one_tensor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(16, keep=False):
        targets = data.num_targets(tokens[_mine(window)])
        parts = _mine(window).split(batch_size)
        for k, ids in enumerate(parts):
            total = data.token_loss(model(tokens[ids]), tokens[ids])
            with nullcontext() if k == len(parts) - 1 else model.no_sync():
                (total / (data.num_targets(tokens[ids]) * len(parts) if by_means else targets)).backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp1(batch_size: int, accumulation_steps: int) -> None:
    _fully_sharded(batch_size, accumulation_steps, one_tensor=False, by_means=False)


def fsdp1_one_tensor(batch_size: int, accumulation_steps: int) -> None:
    _fully_sharded(batch_size, accumulation_steps, one_tensor=True, by_means=False)


def fsdp1_one_tensor_mean_of_means(batch_size: int, accumulation_steps: int) -> None:
    _fully_sharded(batch_size, accumulation_steps, one_tensor=True, by_means=True)


def fsdp1_mean_of_means(batch_size: int, accumulation_steps: int) -> None:
    _fully_sharded(batch_size, accumulation_steps, one_tensor=False, by_means=True)


def ddp_not_divided(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = DistributedDataParallel(data.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(16, keep=False):
        for ids in _mine(window).split(batch_size):
            ce(model(x[ids]), y[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_summed(batch_size: int, accumulation_steps: int) -> None:
    """Multiplied by the number of ranks at every N: visible only against an independent reference."""
    x, y = data.images()
    model = DistributedDataParallel(data.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in _windows(batch_size, accumulation_steps):
        for ids in _mine(window).split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") * dist.get_world_size() / len(_mine(window))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _tokens(rows: Tensor) -> float:
    return float(data.num_targets(rows))


def _language(batch_size: int, accumulation_steps: int, divisor: Callable[[Tensor, Tensor], float]) -> None:
    """Summed losses, each micro-batch divided by `divisor(window, rows of the micro-batch)`; averaged over ranks."""
    tokens = data.sentences()
    model = DistributedDataParallel(data.language_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(16):
        for ids in _mine(window).split(batch_size):
            (data.token_loss(model(tokens[ids]), tokens[ids]) / divisor(tokens[window], tokens[ids])).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_tokens(batch_size: int, accumulation_steps: int) -> None:
    """Unequal tokens per rank: divided by the tokens of the window on all ranks, times the ranks that are averaged over."""
    _language(batch_size, accumulation_steps, lambda window, _: _tokens(window) / dist.get_world_size())


def ddp_tokens_per_rank(batch_size: int, accumulation_steps: int) -> None:
    """Divided by this rank's own tokens, and averaged over ranks, at every N: visible only against an independent reference."""
    _language(batch_size, accumulation_steps, lambda window, _: _tokens(_mine(window)))


def ddp_mean_of_means(batch_size: int, accumulation_steps: int) -> None:
    """Every micro-batch of every rank is averaged over its own tokens."""
    _language(batch_size, accumulation_steps, lambda window, rows: _tokens(rows) * (len(_mine(window)) / len(rows)))


def tokens_on_one_process(batch_size: int, accumulation_steps: int) -> None:
    """The independent reference: all tokens of the window, one process."""
    tokens = data.sentences()
    model = data.language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(batch_size * accumulation_steps):
        (data.token_loss(model(tokens[window]), tokens[window]) / _tokens(tokens[window])).backward()
        optimizer.step()
        optimizer.zero_grad()


def one_process(batch_size: int, accumulation_steps: int) -> None:
    """The independent reference: all rows of the window, one process."""
    x, y = data.images()
    model = data.model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(batch_size * accumulation_steps):
        (ce(model(x[window]), y[window], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp(batch_size: int, accumulation_steps: int) -> None:
    """FSDP2: sharded parameters and DTensor gradients."""
    x, y = data.images()
    model = data.model()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for window in _windows(batch_size, accumulation_steps):
        parts = _mine(window).split(batch_size)
        for k, ids in enumerate(parts):
            model.set_requires_gradient_sync(k == len(parts) - 1)  # type: ignore[operator]
            (ce(model(x[ids]), y[ids], reduction="sum") / len(_mine(window))).backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp_not_divided(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model()
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(16, keep=False):
        for ids in _mine(window).split(batch_size):
            ce(model(x[ids]), y[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()


def _fsdp_language(batch_size: int, accumulation_steps: int, *, by_means: bool, every_backward: bool = False) -> None:
    """FSDP2; where ranks are synchronised at the window's end, `.grad` shows nothing before."""
    tokens = data.sentences()
    model = data.language_model()
    for layer in (model.embedding, model.hidden, model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(16, keep=False):
        targets = data.num_targets(tokens[_mine(window)])
        parts = _mine(window).split(batch_size)
        for k, ids in enumerate(parts):
            model.set_requires_gradient_sync(every_backward or k == len(parts) - 1)  # type: ignore[operator]
            total = data.token_loss(model(tokens[ids]), tokens[ids])
            (total / (data.num_targets(tokens[ids]) * len(parts) if by_means else targets)).backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp_tokens(batch_size: int, accumulation_steps: int) -> None:
    _fsdp_language(batch_size, accumulation_steps, by_means=False)


def fsdp_mean_of_means(batch_size: int, accumulation_steps: int) -> None:
    _fsdp_language(batch_size, accumulation_steps, by_means=True)


def fsdp_mean_of_means_every_backward(batch_size: int, accumulation_steps: int) -> None:
    _fsdp_language(batch_size, accumulation_steps, by_means=True, every_backward=True)


def one_rank_raises(batch_size: int, accumulation_steps: int) -> None:
    ddp(batch_size, accumulation_steps)
    if dist.get_rank() == 1:
        raise RuntimeError("only here")


CASES: dict[Callable[..., Any], set[str]] = {
    ddp: set(),
    ddp_every_backward: set(),
    ddp_never_synchronised: {"replicas_not_synchronised"},
    ddp_not_divided: {"loss_not_divided"},
    ddp_tokens: set(),
    ddp_mean_of_means: {"mean_of_means"},
    fsdp: set(),
    fsdp_not_divided: {"loss_not_divided"},
    fsdp1: set(),
    fsdp1_one_tensor: set(),
    fsdp1_one_tensor_mean_of_means: {"mean_of_means"},
    fsdp1_mean_of_means: {"mean_of_means"},
    fsdp_tokens: set(),
    fsdp_mean_of_means: {"mean_of_means"},
    fsdp_mean_of_means_every_backward: {"mean_of_means"},
}
