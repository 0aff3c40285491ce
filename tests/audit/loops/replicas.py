"""DistributedDataParallel and FSDP on two ranks: right and wrong boundaries of synchronisation."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import X, Y, ce, divided, full_windows, own_mean, own_token_mean

# Boundary: (model, whether it is the window's last micro-batch)


def _mine(window):
    """This rank's rows of a window over all ranks."""
    return window[dist.get_rank() :: dist.get_world_size()]


def _times_ranks(loss):
    """A share of the mean over the window of all ranks, times the ranks: DDP and FSDP average gradients over them."""
    return divided(loss, 1 / dist.get_world_size())


def no_sync_before_the_last(model, last):
    return nullcontext() if last else model.no_sync()


def sharded_sync_at_the_last(model, last):
    model.set_requires_gradient_sync(last)
    return nullcontext()


def every_backward(model, last):
    return nullcontext()


def _train(batch_size, accumulation_steps, model, loss, boundary=every_backward, optimizer=None, windows=data.windows):
    """Accumulate over this rank's part of each window; `boundary` says which backwards synchronise the ranks."""
    optimizer = optimizer or frame.sgd(model)
    for window in windows(batch_size * accumulation_steps * dist.get_world_size()):
        parts = _mine(window).split(batch_size)
        for k, ids in enumerate(parts):
            with boundary(model, k == len(parts) - 1):
                loss(model, ids, window).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- DistributedDataParallel --------------------------------------------------------------------------------------------------


def ddp(batch_size, accumulation_steps):
    """`no_sync` covers all micro-batches but the last; gradients are averaged over ranks, whose windows are equally long."""
    model = DistributedDataParallel(data.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for window in data.windows(batch_size * accumulation_steps * dist.get_world_size()):
        parts = _mine(window).split(batch_size)
        for k, ids in enumerate(parts):
            with nullcontext() if k == len(parts) - 1 else model.no_sync():
                (ce(model(X[ids]), Y[ids], reduction="sum") / len(_mine(window))).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def ddp_every_backward(batch_size, accumulation_steps):
    """Ranks synchronise after every micro-batch: slower, and the same computation."""
    _train(batch_size, accumulation_steps, DistributedDataParallel(data.model()), _times_ranks(frame.mean_over_window))


def ddp_never_synchronised(batch_size, accumulation_steps):
    """`no_sync` covers the last micro-batch too, unless it is the only one."""
    model, loss = DistributedDataParallel(data.model()), _times_ranks(frame.mean_over_window)
    _train(batch_size, accumulation_steps, model, loss, lambda model, _: no_sync_before_the_last(model, accumulation_steps == 1))


def ddp_not_divided(batch_size, accumulation_steps):
    """The mean losses of the micro-batches are added."""
    _train(batch_size, accumulation_steps, DistributedDataParallel(data.model()), own_mean, windows=full_windows)


def ddp_summed(batch_size, accumulation_steps):
    """Gradients are multiplied by the number of ranks at every N: visible only against an independent reference."""
    loss = _times_ranks(_times_ranks(frame.mean_over_window))
    _train(batch_size, accumulation_steps, DistributedDataParallel(data.model()), loss)


def one_process(batch_size, accumulation_steps):
    """The independent reference: all rows of the window, one process."""
    frame.train(batch_size * accumulation_steps, 1, data.model())


def ddp_tokens(batch_size, accumulation_steps):
    """Tokens per rank are unequal: the loss is divided by the window's tokens on all ranks, and multiplied by the ranks."""
    loss = _times_ranks(frame.token_mean_over_window)
    _train(batch_size, accumulation_steps, DistributedDataParallel(data.language_model()), loss)


def ddp_tokens_per_rank(batch_size, accumulation_steps):
    """Each rank divides by its own tokens, at every N: visible only against an independent reference."""
    loss = lambda model, ids, window: frame.token_mean_over_window(model, ids, _mine(window))  # noqa: E731
    _train(batch_size, accumulation_steps, DistributedDataParallel(data.language_model()), loss)


def _mean_of_token_means(model, ids, window):
    """Each micro-batch is averaged over its own tokens, and counts by its rows."""
    return own_token_mean(model, ids, window) * (len(ids) / len(_mine(window)))


def ddp_mean_of_means(batch_size, accumulation_steps):
    """Every micro-batch of every rank is averaged over its own tokens."""
    _train(batch_size, accumulation_steps, DistributedDataParallel(data.language_model()), _mean_of_token_means)


def tokens_on_one_process(batch_size, accumulation_steps):
    """The independent reference: all tokens of the window, one process."""
    frame.train(batch_size * accumulation_steps, 1, data.language_model(), frame.token_mean_over_window)


# -- FSDP1: inside `no_sync` the whole gradient is held until the last backward, which shares it out --------------------------


def _fsdp1(batch_size, accumulation_steps, loss, *, use_orig_params):
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(data.language_model(), device_id=cpu, use_orig_params=use_orig_params)
    _train(batch_size, accumulation_steps, model, loss, no_sync_before_the_last, windows=full_windows)


def fsdp1(batch_size, accumulation_steps):
    """The optimizer sees the original parameters."""
    _fsdp1(batch_size, accumulation_steps, _times_ranks(frame.token_mean_over_window), use_orig_params=True)


def fsdp1_one_tensor(batch_size, accumulation_steps):
    """The optimizer sees one flat tensor."""
    _fsdp1(batch_size, accumulation_steps, _times_ranks(frame.token_mean_over_window), use_orig_params=False)


def fsdp1_mean_of_means(batch_size, accumulation_steps):
    """Original parameters; every micro-batch is averaged over its own tokens."""
    _fsdp1(batch_size, accumulation_steps, _mean_of_token_means, use_orig_params=True)


def fsdp1_one_tensor_mean_of_means(batch_size, accumulation_steps):
    """One flat tensor; every micro-batch is averaged over its own tokens."""
    _fsdp1(batch_size, accumulation_steps, _mean_of_token_means, use_orig_params=False)


# -- FSDP2: sharded parameters and DTensor gradients; where ranks synchronise at the window's end, `.grad` shows nothing before -


def _sharded(model, *layers):
    for layer in (*layers, model):
        fully_shard(layer)
    return model


def _sharded_classifier():
    model = data.model()
    return _sharded(model, model[0], model[2])


def _sharded_language_model():
    model = data.language_model()
    return _sharded(model, model.embedding, model.hidden)


def fsdp_tokens(batch_size, accumulation_steps):
    """The loss is divided by the window's tokens on all ranks, and multiplied by the ranks."""
    model, loss = _sharded_language_model(), _times_ranks(frame.token_mean_over_window)
    _train(batch_size, accumulation_steps, model, loss, sharded_sync_at_the_last, windows=full_windows)


def fsdp_mean_of_means(batch_size, accumulation_steps):
    """Every micro-batch is averaged over its own tokens."""
    model = _sharded_language_model()
    _train(batch_size, accumulation_steps, model, _mean_of_token_means, sharded_sync_at_the_last, windows=full_windows)


def _sharded_by_hand(batch_size, accumulation_steps, loss):
    model, ranks = data.model(), dist.get_world_size()
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    size = -(-len(flat) // ranks)
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    shard = torch.nn.Parameter(flat[mine].clone())
    optimizer = torch.optim.SGD([shard], lr=0.1)
    for window in full_windows(batch_size * accumulation_steps * ranks):
        for ids in _mine(window).split(batch_size):
            loss(model, ids, window).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        dist.all_reduce(gradient)
        shard.grad = (gradient / ranks)[mine].clone()
        optimizer.step()
        parts = [torch.zeros(size) for _ in range(ranks)]
        dist.all_gather(parts, torch.nn.functional.pad(shard.detach(), (0, size - len(shard))))
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(torch.cat(parts)[: len(flat)], model.parameters())
        model.zero_grad()


def sharded_by_hand(batch_size, accumulation_steps):
    """Each rank's optimizer holds its part of the flat weights: ranks step on different gradients, as they should."""
    _sharded_by_hand(batch_size, accumulation_steps, divided(own_mean, accumulation_steps))


def sharded_by_hand_not_divided(batch_size, accumulation_steps):
    """The same, with means over micro-batches added."""
    _sharded_by_hand(batch_size, accumulation_steps, own_mean)


CASES = {
    ddp: set(),
    ddp_every_backward: set(),
    ddp_never_synchronised: {"replicas_not_synchronised"},
    ddp_not_divided: {"loss_not_divided"},
    ddp_tokens: set(),
    ddp_mean_of_means: {"mean_of_means"},
    fsdp1: set(),
    fsdp1_one_tensor: set(),
    fsdp1_one_tensor_mean_of_means: {"mean_of_means"},
    fsdp1_mean_of_means: {"mean_of_means"},
    fsdp_tokens: set(),
    fsdp_mean_of_means: {"mean_of_means"},
    sharded_by_hand: set(),
    sharded_by_hand_not_divided: {"loss_not_divided"},
}
