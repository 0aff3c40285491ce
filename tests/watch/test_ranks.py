"""Two gloo ranks: replicas and shards, synchronised rightly and wrongly."""

import os
import socket
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional

from accumulation_harness.watch import together, watch
from tests.watch.loops import network

N, WINDOWS = 4, 5
CASES = {
    ("replicas", "right"): "equivalent",
    ("replicas", "never synchronised"): "replicas_not_synchronised",
    ("replicas", "summed"): "replica_scale",
    ("replicas", "unequal terms"): "mean_of_means",
    ("replicas", "not divided"): "loss_not_divided",
    ("replicas", "replayed"): "equivalent",
    ("replicas", "replayed, unequal terms"): "mean_of_means",
    ("shards", "right"): "inconclusive",
    ("shards", "always synchronised"): "equivalent",
    ("shards", "not divided"): "loss_not_divided",
}


def penalty(model, x):
    return 0.1 * model(x).square().sum(-1).mean()


def summed(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def penalised(model, batch):
    loss, num = summed(model, batch)
    return loss + num * penalty(model, batch[0]), num


def train(rank, port, kind, case, folder):
    with joined(rank, port):
        train_there(rank, kind, case, folder)


def train_there(rank, kind, case, folder):
    weights = []
    for watched in (True, False):
        model = network()
        wrapped = _wrapped(model, kind)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        rows = torch.Generator().manual_seed(rank)
        replayed = {"loss": penalised if "unequal" not in case else summed} if "replayed" in case else {}
        with watch(wrapped, optimizer, tell=None, **replayed) if watched else nullcontext() as seen:
            for _ in range(WINDOWS):
                for k in range(N):
                    size = 6 if "unequal terms" in case and rank else 4
                    x, y = torch.randn(size, 10, generator=rows), torch.randint(0, 5, (size,), generator=rows)
                    with _synchronised(
                        wrapped, kind, (k == N - 1 or case == "always synchronised") and case != "never synchronised"
                    ):
                        if watched:
                            seen.batch((x, y))
                        loss = functional.cross_entropy(wrapped(x), y) * (2 if case == "summed" else 1)
                        if case == "replayed":  # a loss of which the ledger knows a part only
                            loss = loss + penalty(wrapped, x)
                        (loss / (1 if case == "not divided" else N)).backward()
                optimizer.step()
                optimizer.zero_grad()
        if watched:
            report = seen.report()
            assert report.checked["replays"] == (case == "replayed"), str(report)
            replays = [str(finding.cause) for one in seen.judge.replays for finding in one.findings]
            assert replays == (["mean_of_means"] if case == "replayed, unequal terms" else [])
        weights.append([p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    Path(folder, str(rank)).write_text(" ".join(report.causes) or report.verdict)


def _wrapped(model, kind):
    if kind == "replicas":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _synchronised(model, kind, is_on):
    if kind == "replicas":
        return nullcontext() if is_on else model.no_sync()
    model.set_requires_gradient_sync(is_on)
    return nullcontext()


def spawned(function, *arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(function, (port, *arguments), nprocs=2)


@contextmanager
def joined(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    yield
    distributed.barrier()  # a rank that ends early takes the other's connections with it
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), CASES)
def test_two_ranks(kind, case, tmp_path):
    spawned(train, kind, case, str(tmp_path))
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [CASES[kind, case]] * 2


# -- ranks that are not watched together -------------------------------------------------------------------------------

Rows = torch.Generator


def micro_batches(model, rows, synchronise=lambda k: nullcontext()):
    for k in range(N):
        with synchronise(k):
            x, y = torch.randn(4, 10, generator=rows), torch.randint(0, 5, (4,), generator=rows)
            (functional.cross_entropy(model(x), y) / N).backward()


def by_itself(rank, model, rows):
    micro_batches(model, rows)


def replicas(rank, model, rows):
    micro_batches(model, rows, lambda k: nullcontext() if k == N - 1 else model.no_sync())


def never_synchronised(rank, model, rows):
    micro_batches(model, rows, lambda k: model.no_sync())


def synchronised_by_hand(rank, model, rows):
    """Each micro-batch is divided by the world, too, which is N/2: as often as the loss would be divided once more."""
    micro_batches(model, rows)
    for p in model.parameters():
        assert p.grad is not None
        p.grad /= 2
        distributed.all_reduce(p.grad)


def pipelined(rank, model, rows):
    """The first stage sends what it has made, and then gets the gradients of it back."""
    drawn = [(torch.randn(4, 16, generator=rows), torch.randint(0, 5, (4,), generator=rows)) for _ in range(N)]
    if rank == 0:
        made = [model(x) for x, _ in drawn]
        for out in made:
            distributed.send(out.detach(), 1)
        for out in made:
            gradient = torch.empty_like(out)
            distributed.recv(gradient, 1)
            out.backward(gradient)
        return
    received = [torch.empty(4, 16) for _ in range(N)]
    for x in received:
        distributed.recv(x, 0)
    for x, (_, y) in zip(received, drawn, strict=True):
        (functional.cross_entropy(model(x.requires_grad_()), y) / N).backward()
        distributed.send(x.grad, 0)


def stages(rank, *, alike):
    torch.manual_seed(0)
    return nn.Linear(16, 16) if rank == 0 or alike else nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))


def replica(rank):
    return nn.parallel.DistributedDataParallel(network())


Case = tuple[Callable[[int], nn.Module], Callable[[int, nn.Module, Rows], None], tuple[int, int], tuple[bool, bool], str]
APART: dict[str, Case] = {  # model, a window, steps of each rank, whether each is watched, what those that are say
    "rank 0 alone": (replica, replicas, (4, 4), (True, False), "inconclusive"),
    "models of their own, 3 and 5 steps": (lambda rank: network(), by_itself, (3, 5), (True, True), "equivalent"),
    "replicas, 3 and 5 steps": (replica, never_synchronised, (3, 5), (True, True), "replicas_not_synchronised"),
    "synchronised by hand": (lambda rank: network(), synchronised_by_hand, (4, 4), (True, True), "inconclusive"),
    "unlike stages": (partial(stages, alike=False), pipelined, (4, 4), (True, True), "inconclusive equivalent"),
    "stages of equal shapes": (partial(stages, alike=True), pipelined, (4, 4), (True, True), "inconclusive equivalent"),
}


LATE = 240.0  # longer than all of it takes on a busy machine


def apart(rank, port, folder):
    together.AGREES, together.LATE = 2.0, LATE
    with joined(rank, port):
        for name, (make, window, steps, watched, said) in APART.items():
            weights = []
            for watches in (watched[rank], False):
                model, rows = make(rank), torch.Generator().manual_seed(rank)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                with watch(model, optimizer, tell=None) if watches else nullcontext() as seen:
                    for _ in range(steps[rank]):
                        window(rank, model, rows)
                        optimizer.step()
                        optimizer.zero_grad()
                if watches:
                    report = seen.report()
                    told = " ".join(report.causes) or str(report.verdict)
                    assert told == said.split()[min(rank, len(said.split()) - 1)], f"{name}: {report}"
                    assert not any("the watch ended" in line for line in report.reasons), f"{name}: {report}"
                weights.append([p.detach().clone() for p in model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True)), name
            distributed.barrier()


def test_ranks_that_are_not_watched_together_neither_wait_nor_speak_for_each_other(tmp_path):
    started = time.monotonic()
    spawned(apart, str(tmp_path))
    assert time.monotonic() - started < LATE  # nobody was waited for who had left
