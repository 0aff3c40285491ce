"""Two and four gloo ranks: replicas, shards and parts of a model, synchronised rightly and wrongly."""

import os
import socket
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

from accumulation_harness.watch import shards, together, watch
from accumulation_harness.watch.sketch import folded, local_part
from tests.watch.loops import network, summed

N, WINDOWS = 4, 5
CASES = {
    ("replicas", "right"): "equivalent",
    ("replicas", "never synchronised"): "replicas_not_synchronised",
    ("replicas", "summed"): "replica_scale",
    ("replicas", "unequal terms"): "mean_of_means",
    ("replicas", "not divided"): "loss_not_divided",
    ("replicas", "replayed"): "equivalent",
    ("replicas", "replayed, unequal terms"): "mean_of_means",
    ("shards", "right"): "equivalent",
    ("shards", "always synchronised"): "equivalent",
    ("shards", "not divided"): "loss_not_divided",
}


def penalty(model, x):
    return 0.1 * model(x).square().sum(-1).mean()


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


def spawned(function, *arguments, world=2):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(function, (port, *arguments), nprocs=world)


@contextmanager
def joined(rank, port, world=2):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
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


def test_what_ranks_tell_each_other_of_a_window_is_linear_and_small():
    a, b = np.random.default_rng(0).normal(size=(2, 501, 8))
    assert np.allclose(folded(a) + folded(b), folded(a + b), atol=1e-4)
    assert not np.allclose(folded(a), folded(a[::-1]), atol=1)
    assert 3 * folded(a).nbytes < 8000  # what micro-batches gave, and `.grad` at both ends


def test_a_parameter_that_shards_have_left_out_has_no_members():
    left_out = SimpleNamespace(placements=(Replicate(),), device_mesh=None)
    assert shards._of_mesh(left_out, 3) == shards.Held(3)


# -- ranks that are not watched together -------------------------------------------------------------------------------


def micro_batches(model, rows, synchronise=lambda k: nullcontext()):
    for k in range(N):
        with synchronise(k):
            x, y = torch.randn(4, 10, generator=rows), torch.randint(0, 5, (4,), generator=rows)
            (functional.cross_entropy(model(x), y) / N).backward()


def by_itself(rank, model, rows):
    micro_batches(model, rows)


def replicas(rank, model, rows):
    micro_batches(model, rows, lambda k: nullcontext() if k == N - 1 else model.no_sync())


def held_back(rank, model, rows):
    """FSDP2 keeps whole gradients out of sight until ranks are synchronised."""
    micro_batches(model, rows, lambda k: _synchronised(model, "shards", k == N - 1))


def never_synchronised(rank, model, rows):
    micro_batches(model, rows, lambda k: model.no_sync())


def synchronised_by_hand(rank, model, rows):
    """Each micro-batch is divided by the world, too, which is N/2: as often as the loss would be divided once more."""
    micro_batches(model, rows)
    for p in model.parameters():
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


APART = {  # model, a window, steps of each rank, whether each is watched, what those that are say
    "rank 0 alone": (replica, replicas, (4, 4), (True, False), "inconclusive"),
    "shards": (lambda rank: _wrapped(network(), "shards"), held_back, (4, 4), (True, True), "equivalent"),
    "models of their own, 3 and 5 steps": (lambda rank: network(), by_itself, (3, 5), (True, True), "equivalent"),
    "replicas, 3 and 5 steps": (replica, never_synchronised, (3, 5), (True, True), "replicas_not_synchronised"),
    "synchronised by hand": (lambda rank: network(), synchronised_by_hand, (4, 4), (True, True), "inconclusive"),
    "unlike stages": (partial(stages, alike=False), pipelined, (4, 4), (True, True), "inconclusive equivalent"),
    "stages of equal shapes": (partial(stages, alike=True), pipelined, (4, 4), (True, True), "inconclusive equivalent"),
}


LATE = 240.0  # longer than all of it takes on a busy machine


def apart(rank, port, folder):
    together.AGREES, together.LATE = 5.0, LATE
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
                weights.append([local_part(p.detach()).clone() for p in model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True)), name
            distributed.barrier()


@pytest.mark.slow  # a part of continuous integration
def test_ranks_that_are_not_watched_together_neither_wait_nor_speak_for_each_other(tmp_path):
    started = time.monotonic()
    spawned(apart, str(tmp_path))
    assert time.monotonic() - started < LATE  # nobody was waited for who had left


# -- four ranks in two dimensions --------------------------------------------------------------------------------------

UNEVEN = 3  # micro-batches of a window, which are no number of ranks


class Experts(nn.Module):
    """A sum over experts, of which each rank of a group has some: it gathers the rows of all, and adds up what they give."""

    def __init__(self, group):
        super().__init__()
        whole = torch.randn(4, 10, 16, generator=torch.Generator().manual_seed(1)) / 10
        self.group, self.w = group.get_group(), nn.Parameter(distribute_tensor(whole, group, [Shard(0)]))

    def forward(self, x):
        rows = collectives.all_gather_tensor_autograd(x, 0, self.group)
        return collectives.reduce_scatter_tensor_autograd(
            torch.einsum("nh,ehk->nk", rows, self.w.to_local()), "sum", 0, self.group
        )


def _on_mesh(kind):
    """A model on four ranks; how many of them take rows of their own, and which of these this one is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    rank, model = distributed.get_rank(), network()
    if kind == "flat shards":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True), 4, rank
    if kind.startswith("experts"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "experts"))
        model[0] = fully_shard(Experts(mesh["experts"]), mesh=mesh["rows"])
        model[0].set_force_sum_reduction_for_comms(True)  # gloo has no other
        model[0].set_gradient_divide_factor(2.0 if "as many" in kind else 4.0)
        return fully_shard(model, mesh=init_device_mesh("cpu", (4,))), 4, rank
    parts = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if kind == "tensor parallel":
        return parallelize_module(model, init_device_mesh("cpu", (4,)), parts), 1, 0
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "inside"))
    if kind == "replicas of shards":
        return fully_shard(model, mesh=mesh), 4, rank
    if kind == "shards along columns":
        along = {(5, 16): Shard(1)}
        return (
            fully_shard(model, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=lambda p: along.get(tuple(p.shape))),
            4,
            rank,
        )
    if kind == "sequence parallel shards":
        model.insert(2, nn.LayerNorm(16))
        parts = {"0": ColwiseParallel(output_layouts=Shard(0)), "2": SequenceParallel(sequence_dim=0),
                 "3": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())}  # fmt: skip
    parallelize_module(model, mesh["inside"], parts)
    return fully_shard(model, mesh=mesh["rows"]), 2, rank // 2


def _window_on_mesh(case, model, rows, num, own):
    """Rows are drawn alike on all ranks, each of which takes its own of them."""
    drawn = []
    for _ in range(UNEVEN):
        x, y = torch.randn(num * 6, 10, generator=rows), torch.randint(0, 5, (num * 6,), generator=rows)
        drawn.append((x, torch.where(torch.arange(num * 6) % 6 < torch.randint(1, 7, (), generator=rows), y, -100)))
    terms = sum(int((y >= 0).sum()) for _, y in drawn)
    for k, (x, y) in enumerate(drawn):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(k == UNEVEN - 1 or case in AT_ONCE)
        z, y = model(x.chunk(num)[own]), y.chunk(num)[own]
        right = functional.cross_entropy(z, y, reduction="sum") * num / terms
        (functional.cross_entropy(z, y) / UNEVEN if case == "mean_of_means" else right).backward()
        if case == "gradients_cleared_in_window" and k == 0:
            model.zero_grad()
        if case == "clip_per_micro_batch":
            for p in model.parameters():  # on meshes of their own
                nn.utils.clip_grad_norm_(p, 0.01)


KINDS = (
    "replicas of shards", "shards along columns", "tensor parallel", "tensor parallel shards", "sequence parallel shards",
    "flat shards", "experts",
)  # fmt: skip
AT_ONCE = ("gradients_cleared_in_window", "clip_per_micro_batch")  # faults of a sum that is kept in `.grad`
SAID = ("equivalent", "mean_of_means", *AT_ONCE)


def on_meshes(rank, port, folder):
    with joined(rank, port, world=4):
        found = []
        for kind in KINDS:
            for case in SAID:
                model, num, own = _on_mesh(kind)
                optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.05), torch.Generator().manual_seed(7)
                with watch(model, optimizer, tell=None) as seen:
                    for _ in range(WINDOWS):
                        _window_on_mesh(case, model, rows, num, own)
                        optimizer.step()
                        optimizer.zero_grad()
                report = seen.report()
                found.append(f"{kind}: {' '.join(report.causes) or report.verdict}")
        model, num, own = _on_mesh("experts, divided by as many ranks as have them")
        with watch(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.05), tell=None) as seen:
            for _ in range(2):
                _window_on_mesh("equivalent", model, torch.Generator().manual_seed(7), num, own)
                optimizer.step()
                optimizer.zero_grad()
        assert seen.report().causes == ("replica_scale",)
        Path(folder, str(rank)).write_text("\n".join(found))


@pytest.mark.slow
def test_four_ranks_in_two_dimensions(tmp_path):
    spawned(on_meshes, str(tmp_path), world=4)
    expected = [f"{kind}: {said}" for kind in KINDS for said in SAID]
    for rank in range(4):
        assert (tmp_path / str(rank)).read_text().splitlines() == expected
