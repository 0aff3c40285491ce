"""A training function on several ranks, each a process of its own with `torch.distributed` initialised; their evidence pooled."""

from __future__ import annotations

import inspect
import os
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.multiprocessing as mp

from harness import processes
from harness.audit.evidence import Backward, Finding, Run, Step, Track, Vector, overflow_is_expected
from harness.audit.observe.runs import Job, Train, accepts, load_module, watch
from harness.audit.observe.sample import everything
from harness.judge.cause import Cause

PATIENCE_S = 600.0  # for one call of the function


class Ranks:
    """Processes that stay for the whole audit; the independent reference runs here, on one process and the whole batch."""

    def __init__(self, train: Train, reference: Train | None, processes: int) -> None:
        self.train, self.reference, self.processes = train, reference, processes
        self.address = _address(train)
        self.connections: list[Connection] = []
        self.workers: list[Any] = []
        self._failed = False

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def accepts(self, name: str, *, independent: bool = False) -> bool:
        """Whether the function (or the independent one) has a parameter of that name."""
        return accepts(self.reference if independent else self.train, name)

    def run(self, job: Job) -> list[Run]:
        """Evidence of every rank, in order. A rank that died or hangs gives a run with an error, and all ranks start afresh."""
        if job.independent:
            assert self.reference is not None
            whole = Job(**{**vars(job), "batch_size": job.batch_size * self.processes, "independent": False})
            with everything():
                return [watch(self.reference, whole)]
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
        return Run(batch_size=job.batch_size, accumulation_steps=job.accumulation_steps, error=error)

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
            with processes.interrupts_blocked():
                worker.start()
            theirs.close()
            self.connections.append(mine)
            self.workers.append(worker)

    def _stop(self) -> None:
        processes.end(self.connections, self.workers)
        self.folder.cleanup()


def serve(
    rank: int, world: int, store: str, port: int, address: tuple[str, str], path: list[str], threads: int, link: Connection
) -> None:
    """The life of one rank: join the group, answer jobs until there are none."""
    guard = processes.die_with_parent(partial(shutil.rmtree, Path(store).parent, ignore_errors=True))
    sys.path[:] = path
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
    if cuda:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    train: Train | None = None
    try:
        while (job := link.recv()) is not None:
            try:
                train = train or _find(address)
                run = watch(train, job)
            except Exception as error:
                run = Run(batch_size=job.batch_size, accumulation_steps=job.accumulation_steps)
                run.error = "".join(traceback.format_exception_only(error)).strip()
            link.send(run)
    except (EOFError, OSError):  # the parent is gone: to end here could overtake the guard, and leave the folder
        guard.join()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _address(train: Callable[..., Any]) -> tuple[str, str]:
    """(file, name) under which another process finds the function. Raises ValueError when it cannot."""
    name = getattr(train, "__qualname__", "")
    if not name.isidentifier():
        raise ValueError(
            f"expected a function at the top of a file when processes > 1 (each rank imports it), got {name or train!r}"
        )
    return str(Path(inspect.getfile(train)).resolve()), name


def _find(address: tuple[str, str]) -> Train:
    file, name = address
    function: Train = getattr(load_module(Path(file)), name)
    return function


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


# -- their evidence ---------------------------------------------------------------------------------------------------


@overflow_is_expected
def pooled(runs: Sequence[Run]) -> Run:
    """The first rank's run, with the rows of all ranks in each window, and an error if any rank raised.

    Where ranks hold parts of the weights, the parts one after the other.
    """
    first = runs[0]
    first.ranks = len(runs)
    errors = [f"rank {rank}: {run.error}" for rank, run in enumerate(runs) if run.error is not None]
    if errors and len(runs) > 1:
        first.error = "; ".join(errors)
    sharded = len(runs) > 1 and (all(run.sharded for run in runs) or _hold_parts(runs))
    first.rank_distances = () if sharded or len(runs) == 1 else rank_distances(runs)
    for index, track in enumerate(first.tracks):
        others = [run.tracks[index] for run in runs[1:] if index < len(run.tracks)]
        for t, step in enumerate(track.steps):
            same = [other.steps[t] for other in others if t < len(other.steps)]
            track.steps[t] = _joined(_pooled_step(step, same), same) if sharded else _pooled_step(step, same)
        track.tensors = track.steps[-1].tensors if sharded and track.steps else track.tensors
    return first


def _hold_parts(runs: Sequence[Run]) -> bool:
    """Whether the optimizers hold copies of the model's parameters, and each rank other ones (ZeRO): parts, not replicas."""
    if not all(run.copies and run.tracks and run.tracks[0].steps for run in runs):
        return False
    first, *others = (run.tracks[0].steps[0].before for run in runs)
    return not all(np.array_equal(first, other) for other in others)


def _joined(step: Step, others: Sequence[Step]) -> Step:
    """The parts of all ranks one after the other; what a single micro-batch gave is known only of each rank's whole gradient."""
    steps = (step, *others)
    counts = [[count for _, count in each.tensors] for each in steps]
    tensors = tuple((f"rank {r} {name}", count) for r, each in enumerate(steps) for name, count in each.tensors)
    state = {
        key: np.concatenate([each.state[key] for each in steps]) for key in step.state if all(key in s.state for s in others)
    }
    return replace(
        step,
        tensors=tensors,
        shards=tuple(each.before.size for each in steps),
        gradient=np.concatenate([each.gradient for each in steps]),
        before=np.concatenate([each.before for each in steps]),
        after=np.concatenate([each.after for each in steps]),
        state=state,
        total=None,
        spread=0.0,
        moved=None,
        backwards=tuple(
            replace(b, contribution=None, moved=None, locals=tuple(_in_parts(local, counts) for local in b.locals))
            for b in step.backwards
        ),
        clips=(),
        shadows=(),
    )


def _in_parts(whole: Vector, counts: Sequence[Sequence[int]]) -> Vector:
    """A gradient of whole tensors in the order of the ranks' parts; `counts[r][i]` elements of tensor i are rank r's."""
    widths = np.sum(counts, axis=0)
    if whole.size != widths.sum():
        return whole
    starts = np.cumsum([0, *widths[:-1]]) + np.cumsum([[0] * len(widths), *counts[:-1]], axis=0)
    pieces = zip(starts.flat, np.ravel(counts), strict=True)
    return np.concatenate([whole[start : start + count] for start, count in pieces])


def _pooled_step(step: Step, others: Sequence[Step]) -> Step:
    backwards = []
    for k, backward in enumerate(step.backwards):
        same = [other.backwards[k] for other in others if k < len(other.backwards)]
        backwards.append(_pooled_backward(backward, same))
    return replace(step, backwards=tuple(backwards))


def _pooled_backward(backward: Backward, others: Sequence[Backward]) -> Backward:
    own = [b.local for b in (backward, *others) if b.local is not None]
    backward = replace(backward, locals=tuple(own) if len(own) == 1 + len(others) else ())
    if backward.rows is None or any(other.rows is None for other in others):
        return replace(backward, rows=None)
    return replace(backward, rows=tuple(chain(backward.rows, *(other.rows or () for other in others))))


def rank_distances(runs: Sequence[Run]) -> tuple[float, ...]:
    """Per optimizer step, the largest relative distance of any rank's gradient from the first rank's."""
    distances: list[float] = []
    for tracks in zip(*(run.tracks for run in runs), strict=False):
        for t, pair in enumerate(_per_step(tracks)):
            distances += [0.0] * (t + 1 - len(distances))
            distances[t] = max(distances[t], pair)
    return tuple(distances)


def _per_step(tracks: Sequence[Track]) -> list[float]:
    found = []
    for steps in zip(*(track.steps for track in tracks), strict=False):
        first = steps[0].gradient
        size = float(np.linalg.norm(first)) or 1.0
        found.append(
            max(
                (float(np.linalg.norm(s.gradient - first)) / size for s in steps[1:] if s.gradient.shape == first.shape),
                default=0.0,
            )
        )
    return found


def disagreement(candidate: Run, gate: float) -> list[Finding]:
    """Ranks that step on gradients of their own. All arms of the same run may have it; it is wrong at every N."""
    for t, distance in enumerate(candidate.rank_distances):
        if not distance <= gate:
            evidence = {"distance_between_ranks": distance, "gate": gate, "ranks": candidate.ranks}
            message = f"the ranks step on different gradients ({distance:.2g} apart): they are not averaged before the step"
            return [Finding(candidate.accumulation_steps, t, Cause.replicas_not_synchronised, evidence, message, "ranks")]
    return []
