"""A training function on several ranks, each a process of its own with `torch.distributed` initialised."""

from __future__ import annotations

import inspect
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from typing_extensions import Self

from accumulation_harness.audit.evidence import Run
from accumulation_harness.audit.observe.runs import Functions, Job, Train, failed, load_module, watch
from accumulation_harness.audit.observe.sample import everything
from accumulation_harness.observe.patches import GROUP_STAYS, Patches
from accumulation_harness.system import processes

Address = tuple[str, str] | Train  # of a function in a file; other code is sent as it is
PATIENCE_S = 600.0  # for one call of the function


class Ranks(Functions):
    """Processes that stay for the whole audit; the independent reference runs here, on one process and the whole batch."""

    def __init__(self, train: Train, reference: Train | None, processes: int) -> None:
        super().__init__(train, reference)
        self.train, self.processes = train, processes
        self.address = _address(train)
        self.connections: list[Connection] = []
        self.workers: list[Any] = []
        self._failed = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, job: Job) -> list[Run]:
        """Evidence of every rank, in order. A rank that died or hangs gives a run with an error, and all ranks start afresh."""
        if job.independent:
            with everything():
                return [self.watched(replace(job, batch_size=job.batch_size * self.processes))]
        prepared = getattr(self.train, "prepared", None)  # of code that shares a folder between its ranks
        with nullcontext() if prepared is None else prepared(job.batch_size, job.accumulation_steps):
            with suppress(OSError):  # a rank that is gone is reported below
                for connection in self.connections:
                    connection.send(job)
            runs = [self._receive(connection, job) for connection in self.connections]
        if any(run.error is not None for run in runs):
            self._stop()
            self._start()
        return runs

    def _receive(self, connection: Connection, job: Job) -> Run:
        try:
            if connection.poll(PATIENCE_S if not self._failed else 5.0):
                run: Run = connection.recv()
                self._failed |= run.error is not None
                return run
            error = f"rank did not answer within {PATIENCE_S:.0f} s"
        except (EOFError, OSError):
            error = "rank ended without an answer"
        self._failed = True
        return failed(job, error)

    def _start(self) -> None:
        self._failed = False
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        port = _free_port()
        context = mp.get_context("spawn")
        self.connections, self.workers = [], []
        for rank in range(self.processes):
            mine, theirs = context.Pipe()
            store = str(Path(self.folder.name) / "store")
            arguments = (rank, self.processes, store, port, self.address, list(sys.path), torch.get_num_threads(), theirs)
            worker = context.Process(target=serve, args=arguments, daemon=True)
            with processes.interrupts_blocked(), _our_modules_found():
                worker.start()
            theirs.close()
            self.connections.append(mine)
            self.workers.append(worker)

    def _stop(self) -> None:
        processes.end(self.connections, self.workers)
        self.folder.cleanup()


def serve(
    rank: int, world: int, store: str, port: int, address: Address, path: list[str], threads: int, link: Connection
) -> None:
    """The life of one rank: join the group, answer jobs until there are none."""
    processes.die_with_parent()
    sys.path[:] = path
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
    if cuda:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",  # a loop may stay on the CPU of a machine with GPUs
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
    )
    patches = Patches()
    patches.replace(GROUP_STAYS)
    train: Train | None = None
    try:
        while (job := link.recv()) is not None:
            try:
                train = train or _find(address)
                run = watch(train, job)
            except Exception as error:
                run = failed(job, "".join(traceback.format_exception_only(error)).strip())
            link.send(run)
    except (EOFError, OSError):  # the parent is gone
        return
    finally:
        patches.restore()
    if dist.is_initialized():
        dist.destroy_process_group(dist.group.WORLD)


@contextmanager
def _our_modules_found() -> Iterator[None]:
    """A process that is started inside finds our modules before those of a folder that holds a `accumulation_harness.py`.

    It imports the main module and `serve` before it is told `path`, from where this process would find them now.
    """
    path, ours = list(sys.path), Path(__file__).parents[2]
    found = PathFinder.find_spec(__name__.partition(".")[0])
    if found is None or found.origin is None or Path(found.origin).parent != ours:
        sys.path.insert(0, str(ours.parent))
    try:
        yield
    finally:
        sys.path[:] = path


def _address(train: Train) -> Address:
    """(file, name) under which another process finds the function. Raises ValueError when it cannot."""
    if hasattr(train, "prepared"):
        return train
    name = getattr(train, "__qualname__", "")
    if not name.isidentifier():
        raise ValueError(
            f"expected a function at the top of a file when processes > 1 (each rank imports it), got {name or train!r}"
        )
    return str(Path(inspect.getfile(train)).resolve()), name


def _find(address: Address) -> Train:
    if callable(address):
        return address
    file, name = address
    function: Train = getattr(load_module(Path(file)), name)
    return function


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
