"""Ranks that another program starts (torchrun, srun): rank 0 judges, and all ranks make the runs that it asks for."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from datetime import timedelta
from functools import lru_cache
from itertools import count
from multiprocessing.connection import Client, Listener
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from accumulation_harness.audit.evidence import Run
from accumulation_harness.audit.observe.ranks import PATIENCE_S, Meeting, Ranks, serve
from accumulation_harness.audit.observe.runs import Job, Train, failed
from accumulation_harness.audit.rank import Rank

AT_HOME = ("localhost", "127.0.0.1")
_numbers = count()  # of the audits of this process; on every rank the same


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
