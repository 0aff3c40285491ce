"""Four ranks: data, tensor and pipeline parallelism, right ones, and faults that were released.

Under a launcher this file audits several of its functions in one start: `meshes.py FOLDER NAME NAME`.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from accumulation_harness.audit import audit_launched
from scoreboard import data
from tests.audit.loops import frame, replicas
from tests.audit.loops.frame import TOKENS, X, Y, ce, full_windows, token_mean_over_window

CPU = torch.device("cpu")
RATE = 1e-3  # which stays stable where a gradient is 100 times too large
PARTS = 2  # pipeline micro-batches per call of the schedule


# -- data parallelism ---------------------------------------------------------------------------------------------------------


def _rows(window, rank, world):
    return window[rank::world]


def _average(model, group=None):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)


def _by_hand(batch_size, accumulation_steps, **stages):
    """Every rank adds up its share of the window's mean; the gradients of the ranks are added before the step."""
    model, rank, world = data.model(), dist.get_rank(), dist.get_world_size()
    optimizer = frame.adamw(1e-2)(model)
    if "make" in stages:
        stages |= stages.pop("make")(model)
    before_step = stages.pop("before_step", frame.nothing)

    def synchronise():
        before_step()
        _average(model)

    for window in full_windows(batch_size * accumulation_steps * world):
        frame.train(
            batch_size,
            accumulation_steps,
            model,
            lambda model, ids, own: ce(model(X[ids]), Y[ids], reduction="sum") / len(own),
            optimizer,
            windows=lambda size, window=window: [_rows(window, rank, world)],
            before_step=synchronise,
            **stages,
        )


def by_hand(batch_size, accumulation_steps):
    """Gradients are averaged over the ranks before the step, without a wrapper."""
    _by_hand(batch_size, accumulation_steps)


def one_rank_killed(batch_size, accumulation_steps):
    """The process of rank 2 is gone once micro-batches are accumulated."""
    if accumulation_steps > 1 and dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    _by_hand(batch_size, accumulation_steps)


def one_rank_without_tokens(batch_size, accumulation_steps):
    """In every window one rank has rows without a single token to learn from; losses are divided by the window's tokens."""
    tokens = TOKENS.clone()
    tokens[3::4, 1:] = 0

    def loss(model, ids, window):
        share = data.token_loss(model(tokens[ids]), tokens[ids]) / data.num_targets(tokens[window])
        return share * dist.get_world_size()

    replicas._train(batch_size, accumulation_steps, DistributedDataParallel(data.language_model()), loss)


def synchronised_first(batch_size, accumulation_steps):
    """FunASR#3472: `batch_idx % accum_grad` synchronises the first micro-batch, and leaves the others to their ranks."""
    model = DistributedDataParallel(data.model())
    optimizer = frame.sgd(model)
    for window in full_windows(batch_size * accumulation_steps * dist.get_world_size()):
        for k, ids in enumerate(_rows(window, dist.get_rank(), dist.get_world_size()).split(batch_size)):
            with replicas.no_sync_before_the_last(model, k % accumulation_steps == 0):
                (ce(model(X[ids]), Y[ids]) / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def _overwritten(model):
    buffer = frame.Buffer(model)

    def put():
        buffer.empty()
        buffer.add()
        model.zero_grad()

    return {"after_backward": put, "before_step": buffer.hand_over}


def main_gradient_overwritten(batch_size, accumulation_steps):
    """Primus#1046: the main gradient is overwritten by every micro-batch, and only the last one's is kept."""
    _by_hand(batch_size, accumulation_steps, make=_overwritten)


def momentum_per_micro_batch(batch_size, accumulation_steps):
    """DeepSpeed#8443: the momentum of Muon decays in every micro-batch, not once per optimizer step."""
    model, rank, world = data.model(), dist.get_rank(), dist.get_world_size()
    optimizer = frame.sgd(model, momentum=0.9)
    for window in full_windows(batch_size * accumulation_steps * world):
        for k, ids in enumerate(_rows(window, rank, world).split(batch_size)):
            (ce(model(X[ids]), Y[ids]) / accumulation_steps).backward()
            for state in optimizer.state.values() if k else ():
                state["momentum_buffer"].mul_(0.9)
        _average(model)
        optimizer.step()
        optimizer.zero_grad()


def sharded_gradients_lost(batch_size, accumulation_steps):
    """As open-instruct#1498 is told: sharded gradients are lost between the micro-batches of a window."""
    model = replicas._sharded_classifier()
    optimizer = frame.adamw(1e-2)(model)
    for window in full_windows(batch_size * accumulation_steps * dist.get_world_size()):
        for ids in _rows(window, dist.get_rank(), dist.get_world_size()).split(batch_size):
            optimizer.zero_grad()
            (ce(model(X[ids]), Y[ids]) / accumulation_steps).backward()
        optimizer.step()


# -- tensor parallelism: all ranks take the same rows -------------------------------------------------------------------------


def _tensor_parallel(batch_size, accumulation_steps, loss):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(data.model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    frame.train(batch_size, accumulation_steps, model, loss, windows=full_windows)


def tensor_parallel(batch_size, accumulation_steps):
    """The first layer is cut by its outputs, the second by its inputs."""
    _tensor_parallel(batch_size, accumulation_steps, frame.mean_over_window)


def tensor_parallel_not_divided(batch_size, accumulation_steps):
    """The mean losses of the micro-batches are added."""
    _tensor_parallel(batch_size, accumulation_steps, frame.own_mean)


# -- pipelines ----------------------------------------------------------------------------------------------------------------


def deep():
    """Four layers, two of them of one size; slices keep the names of their tensors."""
    torch.manual_seed(0)
    layers = (nn.Linear(data.FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(16, data.CLASSES))


def deep_language_model():
    """Four stages for tokens."""
    torch.manual_seed(0)
    width = 16
    layers = (nn.Embedding(data.VOCABULARY, width), nn.Identity(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*layers, nn.LayerNorm(width), nn.Identity(), nn.Linear(width, data.VOCABULARY))


def _sum_of_rows(logits, labels):
    return ce(logits, labels, reduction="sum")


def _calls(batch_size, accumulation_steps, rank, world):
    """The window, and this replica's rows of each call of the schedule in it."""
    for window in full_windows(batch_size * accumulation_steps * world):
        yield window, list(_rows(window, rank, world).split(batch_size))


def _pipeline(
    batch_size,
    accumulation_steps,
    *,
    model=None,
    inputs=X,
    labels=Y,
    loss=_sum_of_rows,
    terms=len,
    replicas=1,
    stages=1,
    schedule=ScheduleGPipe,
    scale_grads=False,
    rate=0.1,
    before_call=lambda optimizer: None,
):
    """Sums of losses per call of the schedule; every gradient is divided by the `terms` of the window before the step."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replica", "stage"))
    replica, rank, ranks = mesh["replica"].get_local_rank(), mesh["stage"].get_local_rank(), world // replicas
    group, model = mesh["stage"].get_group(), deep() if model is None else model
    width = -(-len(model) // (ranks * stages))
    mine = [rank + ranks * k for k in range(stages)]
    parts = [model[width * k : width * (k + 1)] for k in mine]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=rate)
    held = [PipelineStage(part, k, ranks * stages, CPU, group=group) for part, k in zip(parts, mine, strict=True)]
    calls = schedule(held if stages > 1 else held[0], PARTS, loss_fn=loss, scale_grads=scale_grads)
    for window, of_calls in _calls(batch_size, accumulation_steps, replica, replicas):
        for ids in of_calls:
            before_call(optimizer)
            given = {"target": labels[ids]} if ranks * stages - 1 in mine else {}
            calls.step(*([inputs[ids]] if rank == 0 else []), **given)
        for p in nn.ModuleList(parts).parameters():
            if replicas > 1:
                dist.all_reduce(p.grad, group=mesh["replica"].get_group())
            p.grad /= terms(window)
        optimizer.step()
        optimizer.zero_grad()


def pipeline(batch_size, accumulation_steps):
    """Four stages; N calls of the schedule per step, two parts per call."""
    _pipeline(batch_size, accumulation_steps)


def pipeline_one_by_one(batch_size, accumulation_steps):
    """Two stages with one forward and one backward at a time, and two replicas of them."""
    _pipeline(batch_size, accumulation_steps, replicas=2, schedule=Schedule1F1B)


def interleaved(batch_size, accumulation_steps):
    """Two replicas of four stages, of which each rank holds the first and the third, or the second and the fourth."""
    _pipeline(batch_size, accumulation_steps, replicas=2, stages=2, schedule=ScheduleInterleaved1F1B)


def pipeline_scaled(batch_size, accumulation_steps):
    """torchtitan#1733: every call of the schedule divides the sum so far."""
    _pipeline(batch_size, accumulation_steps, scale_grads=True)


def pipeline_wiped(batch_size, accumulation_steps):
    """Automodel#3530: the pipeline is set up anew before every call, which wipes the gradients."""
    _pipeline(batch_size, accumulation_steps, before_call=lambda optimizer: optimizer.zero_grad())


def _token_sum(logits, tokens):
    return data.token_loss(logits, tokens)


_of_tokens = {"inputs": TOKENS, "labels": TOKENS, "loss": _token_sum}


def pipeline_of_tokens(batch_size, accumulation_steps):
    """The sum over the window's tokens is divided by their number."""
    terms = lambda window: data.num_targets(TOKENS[window])  # noqa: E731
    _pipeline(batch_size, accumulation_steps, model=deep_language_model(), terms=terms, rate=RATE, **_of_tokens)


def pipeline_not_divided(batch_size, accumulation_steps):
    """torchtitan#2972: gradients of a pipeline are larger by the number of valid tokens, at every N."""
    _pipeline(batch_size, accumulation_steps, model=deep_language_model(), terms=lambda window: 1, rate=RATE, **_of_tokens)


def tokens_on_one_process(batch_size, accumulation_steps):
    """The independent reference of the two."""
    model = deep_language_model()
    frame.train(batch_size, accumulation_steps, model, token_mean_over_window, frame.sgd(model, RATE), windows=full_windows)


def rows_on_one_process(batch_size, accumulation_steps):
    """The independent reference of two replicas of a pipeline."""
    frame.train(batch_size, accumulation_steps, deep(), windows=full_windows)


RIGHT = {
    "ddp": {},
    "by_hand": {},
    "fsdp_tokens": {},
    "ddp_tokens": {"reference": replicas.tokens_on_one_process},
    "one_rank_without_tokens": {},
    "tensor_parallel": {"batch_size": 16},
    "pipeline": {"batch_size": 16},
    "pipeline_one_by_one": {"batch_size": 8},
    "pipeline_of_tokens": {"batch_size": 16, "reference": tokens_on_one_process, "replicas": 1},
    "interleaved": {"batch_size": 8, "reference": rows_on_one_process, "replicas": 2},
}
WRONG = {
    "pipeline_scaled": ({"batch_size": 16}, {"sum_rescaled_in_window"}),
    "pipeline_not_divided": (
        {"batch_size": 16, "reference": tokens_on_one_process, "replicas": 1},
        {"counter_wrong"},
    ),
    "pipeline_wiped": ({"batch_size": 16}, {"gradients_cleared_in_window"}),
    "sharded_gradients_lost": ({}, {"gradients_cleared_in_window"}),
    "main_gradient_overwritten": ({}, {"micro_batches_lost"}),
    "momentum_per_micro_batch": ({}, {"optimizer_state_per_micro_batch"}),
    "synchronised_first": ({}, {"replicas_not_synchronised"}),
    "ddp_tokens_per_rank": ({"reference": replicas.tokens_on_one_process}, {"replica_scale"}),
    "tensor_parallel_not_divided": ({"batch_size": 16}, {"loss_not_divided"}),
}


def main(folder, *names):
    """Audit these functions one after the other."""
    gc.freeze()  # what was imported need not be looked through in every run
    for name in names:
        options = {"batch_size": 4, **(RIGHT.get(name) or WRONG.get(name, ({}, set()))[0])}
        train = globals().get(name) or getattr(replicas, name)
        report = audit_launched(train, accumulation_steps=(4,), **options)
        if report is not None:
            report.save(Path(folder, f"{name}.json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
