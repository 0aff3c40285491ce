"""Two gloo ranks: replicas and shards, synchronised rightly and wrongly."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional

from accumulation_harness.watch import watch
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


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 0.1 * model(x).square().sum(-1).mean()


def summed(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def penalised(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    loss, num = summed(model, batch)
    return loss + num * penalty(model, batch[0]), num


def train(rank: int, kind: str, case: str, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
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
    distributed.barrier()  # a rank that ends early takes the other's connections with it
    distributed.destroy_process_group()


def _wrapped(model: nn.Sequential, kind: str) -> nn.Module:
    if kind == "replicas":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _synchronised(model: nn.Module, kind: str, is_on: bool) -> object:
    if kind == "replicas":
        return nullcontext() if is_on else model.no_sync()
    model.set_requires_gradient_sync(is_on)
    return nullcontext()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), CASES)
def test_two_ranks(kind: str, case: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (kind, case, port, str(tmp_path)), nprocs=2)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == [CASES[kind, case]] * 2
