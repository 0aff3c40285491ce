"""A training function on several ranks with `torch.distributed` initialised: processes of ours, or those of torchrun and srun.

Of the latter rank 0 judges, and all ranks make the runs that it asks for.
"""

from __future__ import annotations

import inspect
import os
import secrets
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from importlib.machinery import PathFinder
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from typing_extensions import Self

from accumulation_harness.audit.evidence import Run
from accumulation_harness.audit.observe.places import everything
from accumulation_harness.audit.observe.runs import Functions, Job, Train, failed, load_module, watch
from accumulation_harness.audit.rank import Rank
from accumulation_harness.observe.patches import Patches, group_stays
from accumulation_harness.system import processes

Address = tuple[str, str] | Train  # of a function in a file; other code is sent as it is
PATIENCE_S = 600.0  # for one call of the function
HERE = "127.0.0.1"
AT_HOME = ("localhost", HERE)
OF_A_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_numbers = count()  # of the audits of this process; on every rank the same


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other."""

    host: str
    port: int
    name: str

    def store(self) -> Store:
        """A store that all of them share."""
        return PrefixStore(self.name, TCPStore(self.host, self.port, is_master=False))


class Ranks(Functions):
    """Processes that stay for the whole audit; the independent reference runs here, with the rows of all replicas."""

    def __init__(self, train: Train, reference: Train | None, processes: int, replicas: int | None = None) -> None:
        super().__init__(train, reference)
        self.train, self.processes, self.replicas = train, processes, replicas or processes
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
            with _as_one_process(), everything():
                return [self.watched(replace(job, batch_size=job.batch_size * self.replicas))]
        prepared = getattr(self.train, "prepared", None)  # of code that shares a folder between its ranks
        with nullcontext() if prepared is None else prepared(job.batch_size, job.accumulation_steps):
            with suppress(OSError):  # a rank that is gone is reported below
                for connection in self.connections:
                    connection.send(job)
            runs = [self._receive(connection, job) for connection in self.connections]
        if any(run.error is not None for run in runs):
            self._renew()
        return runs

    def _receive(self, connection: Connection, job: Job) -> Run:
        try:
            if connection.poll(PATIENCE_S if not self._failed else 5.0):
                run: Run = connection.recv()
                self._failed |= run.error is not None
                return run
            error = f"did not answer within {PATIENCE_S:.0f} s"
        except (EOFError, OSError):
            error = "ended without an answer"
        self._failed = True
        return failed(job, error)

    def _renew(self) -> None:
        self._stop()
        self._start()

    def _start(self) -> None:
        self._failed = False
        self.store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
        variables = {"LOCAL_WORLD_SIZE": str(self.processes), "MASTER_ADDR": HERE, "MASTER_PORT": str(_free_port())}
        cuda = torch.cuda.is_available() and torch.cuda.device_count() >= self.processes
        for number in range(self.processes):
            rank = Rank(number, self.processes, number)
            self._spawn(rank, Meeting(HERE, self.store.port, "audit"), cuda=cuda, variables=variables | rank.variables)

    def _spawn(self, rank: Rank, meeting: Meeting, *, cuda: bool, variables: Mapping[str, str]) -> None:
        context = mp.get_context("spawn")
        mine, theirs = context.Pipe()
        arguments = (rank, meeting, self.address, theirs, cuda, variables, list(sys.path), torch.get_num_threads())
        worker = context.Process(target=_serve_here, args=arguments, daemon=True)
        with processes.interrupts_blocked(), _our_modules_found():
            worker.start()
        theirs.close()
        self.connections.append(mine)
        self.workers.append(worker)

    def _stop(self) -> None:
        processes.end(self.connections, self.workers)
        self.connections, self.workers = [], []


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Without what says that this is one of several ranks."""
    hidden = {name: os.environ.pop(name) for name in OF_A_GROUP if name in os.environ}
    try:
        yield
    finally:
        os.environ |= hidden


def _serve_here(
    rank: Rank,
    meeting: Meeting,
    address: Address,
    link: Connection,
    cuda: bool,
    variables: Mapping[str, str],
    path: list[str],
    threads: int,
) -> None:
    """A rank in a process that was started for it."""
    processes.die_with_parent()
    sys.path[:] = path
    os.environ |= variables
    torch.set_num_threads(threads)
    serve(rank, meeting, address, link, cuda=cuda)


def serve(rank: Rank, meeting: Meeting, address: Address, link: Connection, *, cuda: bool) -> None:
    """Join the group, and answer jobs until there are none, or one fails: to leave ends the others' waiting for this rank.

    Args:
        rank: Number and variables of this rank.
        meeting: Address at which the group meets.
        address: Address at which rank 0 listens.
        link: The connection to rank 0.
        cuda: Whether the ranks use GPUs.
    """
    if cuda:
        torch.cuda.set_device(rank.local % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"  # a loop may stay on the CPU of a machine with GPUs
    dist.init_process_group(backend, store=meeting.store(), rank=rank.number, world_size=rank.world)
    patches = Patches()
    patches.replace({(dist, name): group_stays for name in ("init_process_group", "destroy_process_group")})
    train: Train | None = None
    run: Run | None = None
    try:
        while (run is None or run.error is None) and (job := link.recv()) is not None:
            try:
                train = train or _find(address)
                run = watch(train, job)
            except Exception as error:
                run = failed(job, "".join(traceback.format_exception_only(error)).strip())
            link.send(run)
    except (EOFError, OSError):  # whoever asks is gone
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
        listener.bind((HERE, 0))
        port: int = listener.getsockname()[1]
        return port


# -- ranks that another program starts -----------------------------------------------------------------------------------


class Launched(Ranks):
    """What rank 0 asks. A process that it starts is the rank itself, so that the judging one waits in no collective."""

    def __init__(self, train: Train, reference: Train | None, rank: Rank, replicas: int) -> None:
        """`replicas`: ranks that take rows of their own."""
        super().__init__(train, reference, rank.world, replicas)
        self.rank, self.meeting = rank, _next_meeting()
        self.gone: list[str] = []  # what is not known for that
        self._open = ExitStack()

    def run(self, job: Job) -> list[Run]:
        """The evidence of every rank, in order; of ranks that are gone, none."""
        return [failed(job, "the ranks are gone")] if self.gone else super().run(job)

    def _start(self) -> None:
        secret, store = secrets.token_bytes(), self.meeting.store()
        listener = self._open.enter_context(
            Listener((self.meeting.host if self.meeting.host in AT_HOME else "", 0), authkey=secret)
        )
        store.set("judge", f"{listener.address[1]} {secret.hex()}")
        self._spawn(self.rank, self.meeting, cuda=torch.cuda.is_available(), variables=self.rank.variables)
        store.wait([f"rank {n}" for n in range(1, self.rank.world)], timedelta(seconds=PATIENCE_S))
        links = [self._open.enter_context(listener.accept()) for _ in range(1, self.rank.world)]
        self.connections += sorted(links, key=lambda link: int(link.recv()))

    def _stop(self) -> None:
        super()._stop()
        self._open.close()

    def _renew(self) -> None:
        """Nobody starts them again."""
        self.gone.append("what further runs would have shown: a rank has raised, and its launcher starts it only once")


def answer(train: Train, rank: Rank) -> None:
    """The life of a rank besides 0: it makes the runs that rank 0 asks for.

    Args:
        train: The audited function.
        rank: Number and variables of this rank.
    """
    os.environ |= rank.variables
    meeting = _next_meeting()
    store = meeting.store()
    store.set(f"rank {rank.number}", "here")
    port, secret = store.get("judge").decode().split()
    with Client((meeting.host, int(port)), authkey=bytes.fromhex(secret)) as link:
        link.send(rank.number)
        serve(rank, meeting, train, link, cuda=torch.cuda.is_available())


def _next_meeting() -> Meeting:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _store_is_there(host, port)
    return Meeting(host, port, f"audit {next(_numbers)}")


@lru_cache(maxsize=1)
def _store_is_there(host: str, port: int) -> Any:
    """The store of torchrun; under srun, which has none, rank 0 makes it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or Rank.of_environment().number:
        return None
    return TCPStore(host, port, is_master=True, wait_for_workers=False)
