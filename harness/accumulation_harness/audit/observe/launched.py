"""One rank of several that another program starts (torchrun, srun): its runs, and the evidence that it writes."""

from __future__ import annotations

import atexit
import hashlib
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from typing_extensions import Self

from accumulation_harness.audit.evidence import Run
from accumulation_harness.audit.observe.recorded import REFERENCE, Evidence, Key, Setting, key, name_of
from accumulation_harness.audit.observe.runs import Functions, Job, Train, accepts, failed
from accumulation_harness.audit.observe.sample import everything
from accumulation_harness.audit.request import OFFERED
from accumulation_harness.observe.patches import GROUP_STAYS, Patches

STARTERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
OF_A_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rank:
    """Which rank this process is."""

    number: int
    world: int
    local: int  # among those of its machine

    @classmethod
    def of_environment(cls) -> Rank:
        """Raises ValueError where no launcher has said it."""
        for names in STARTERS:
            given = [os.environ.get(name, "") for name in names]
            if all(number.isdecimal() for number in given[:2]):
                return cls(int(given[0]), int(given[1]), int(given[2]) if given[2].isdecimal() else 0)
        raise ValueError(
            "expected to be started by torchrun (RANK, WORLD_SIZE) or srun (SLURM_PROCID, SLURM_NTASKS), got neither's variables"
        )


class Launched(Functions):
    """Makes the jobs of this rank and keeps what they show. It makes none after one that failed: the others would wait for it.

    The independent reference runs on rank 0 alone, on the whole batch, before the ranks join; the others read what it showed.
    """

    def __init__(self, train: Train, reference: Train | None, rank: Rank, setting: Setting, folder: Path) -> None:
        super().__init__(train, reference)
        self.rank, self.setting, self.folder = rank, setting, folder
        self.made: list[tuple[Key, Run]] = []
        self._alone: list[tuple[Key, Run]] = []
        self._joined = self._failed = False
        self._patches = Patches()

    def __enter__(self) -> Self:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name_of(self.rank.number, self.rank.world)).unlink(missing_ok=True)  # of an earlier audit
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.restore()

    def run(self, job: Job) -> list[Run]:
        """The evidence of this rank alone."""
        if job.independent:
            return [self._independent(job)]
        self._join()
        if self._failed:
            return [failed(job, "not made")]
        with everything():
            run = self.watched(_keeping(job))
        self._failed = run.error is not None
        self.made.append((key(job), run))
        return [run]

    def write(self) -> Path:
        """Write the evidence of this rank, whole or not at all; the file."""
        return self._write(name_of(self.rank.number, self.rank.world), self.made)

    def _write(self, name: str, made: list[tuple[Key, Run]]) -> Path:
        path = self.folder / name
        targets = tuple(None if f is None else target(f) for f in self.functions.values())
        Evidence(
            rank=self.rank.number,
            world=self.rank.world,
            setting=self.setting,
            targets=(str(targets[0]), targets[1]),
            runs=tuple(made),
        ).write(path)
        return path

    def _independent(self, job: Job) -> Run:
        if self.rank.number:
            self._join()
            if not self._alone:
                self._alone = list(Evidence.read(self.folder / REFERENCE).runs)
            return dict(self._alone)[key(job)]
        whole = replace(job, batch_size=job.batch_size * self.setting.replicas)
        with _as_one_process(), everything():
            run = self.watched(_keeping(whole))
        self._alone.append((key(job), run))
        return run

    def _join(self) -> None:
        """Be one of the group; rank 0 has the reference's runs written by then."""
        if self._joined:
            return
        if self.functions[True] is not None and not self.rank.number:
            self._write(REFERENCE, self._alone)
        os.environ |= {"RANK": str(self.rank.number), "WORLD_SIZE": str(self.rank.world), "LOCAL_RANK": str(self.rank.local)}
        if torch.cuda.is_available():
            torch.cuda.set_device(self.rank.local % torch.cuda.device_count())
        if dist.is_initialized():
            dist.barrier()  # the reference's runs are written
        else:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            atexit.register(dist.destroy_process_group)
        self._joined = True
        namespaces = [f.__globals__ for f in self.functions.values() if f is not None and hasattr(f, "__globals__")]
        self._patches.replace(GROUP_STAYS, namespaces)


def _keeping(job: Job) -> Job:
    """With the contributions of all micro-batches kept: there is no second run for those that turn out to be needed."""
    steps = job.max_steps or 0
    return replace(job, intervention=replace(job.intervention, keep=frozenset(range(steps))))


@contextmanager
def _as_one_process() -> Iterator[None]:
    """Without what says that this is one of several ranks."""
    hidden = {name: os.environ.pop(name) for name in OF_A_GROUP if name in os.environ}
    try:
        yield
    finally:
        with suppress(KeyError):
            os.environ |= hidden


def setting_of(
    train: Train,
    reference: Train | None,
    *,
    batch_size: int,
    accumulation_steps: tuple[int, ...],
    max_steps: int,
    replicas: int,
) -> Setting:
    """What this rank is asked for, and of which source text."""
    return Setting(
        function=train.__name__,
        source=_source(train),
        reference=None if reference is None else reference.__name__,
        reference_source=None if reference is None else _source(reference),
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
        max_steps=max_steps,
        replicas=replicas,
        accepts=(_accepted(train), _accepted(reference)),
        torch=str(torch.__version__),
    )


def target(train: Train) -> str:
    """FILE.py:FUNCTION, or SCRIPT.py."""
    return f"{_file(train)}:{getattr(train, 'function', train.__name__)}".removesuffix(":")


def _source(train: Train) -> str:
    return hashlib.sha256(_file(train).read_bytes()).hexdigest()


def _file(train: Train) -> Path:
    return Path(getattr(train, "source", None) or inspect.getfile(train)).resolve()


def _accepted(train: Train | None) -> tuple[str, ...]:
    return tuple(name for name in OFFERED if accepts(train, name))
