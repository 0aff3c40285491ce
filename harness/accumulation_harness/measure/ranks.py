"""Processes that train one model together, each on its share of every window, with gloo between them.

A rank runs a recipe as any arm does; the stages and divisors below are those that speak to the other ranks. What a rank sends is
counted. Float64, on the CPU.
"""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from typing_extensions import Self

from accumulation_harness.config import ConfigError, LastWindow, Precision, Split, TrialConfig
from accumulation_harness.measure.lock_step import Setting, Watch
from accumulation_harness.recipes.micro_batch import Ragged
from accumulation_harness.recipes.recipe import Arm, Recipe, take_step
from accumulation_harness.referee.gradients import flatten
from accumulation_harness.system import processes
from accumulation_harness.workloads import Batch

TIMEOUT_S = 120.0  # for one collective, and for the answer to one job

Vector = NDArray[np.float64]
OverRanks = Callable[["Wire", Tensor], Tensor]
SyncRule = Callable[[int, int], bool]  # (position of the micro-batch, micro-batches of the window) -> synchronise after it?
Way = Callable[["Wire", int, Split], Recipe]  # (wire, N, split) -> the recipe of one way to synchronise


@dataclass(kw_only=True)
class Wire:
    """All-reduces of one rank: how many gradients it gave into them, and the bytes of gradients and of numbers of loss terms."""

    world: int
    gradient_reductions: int = 0
    gradient_bytes: int = 0
    count_bytes: int = 0

    def sum_gradients(self, flat: Tensor) -> Tensor:
        """sum_r g_r over the ranks, [P], in place."""
        self.count(flat)
        dist.all_reduce(flat)
        return flat

    def sum_terms(self, own: Tensor) -> Tensor:
        """n, all loss terms of the window (0-dim)."""
        total = own.clone()
        self.count_bytes += total.numel() * total.element_size()
        dist.all_reduce(total)
        return total

    def count(self, flat: Tensor) -> None:
        """Count one all-reduce of the gradient `flat`, or of a bucket of it."""
        self.gradient_reductions += 1
        self.gradient_bytes += flat.numel() * flat.element_size()


# What a rank divides its summed losses by, beside `Wire.sum_terms`: that is for gradients that are summed over the ranks --------


def _scaled_terms(wire: Wire, own: Tensor) -> Tensor:
    """n / W of W ranks: for gradients that are averaged over the ranks, as DDP does."""
    return wire.sum_terms(own) / wire.world


def _own_terms(wire: Wire, own: Tensor) -> Tensor:
    """n_r, the loss terms of the rank's own share: each rank takes the mean over it."""
    return own


# How gradients are combined, and when ----------------------------------------------------------------------------------------


def averaged(wire: Wire, flat: Tensor) -> Tensor:
    """1/W sum_r g_r over the W ranks, [P].

    Args:
        wire: How ranks exchange.
        flat: [P] gradient of this rank.

    Returns:
        [P].
    """
    return wire.sum_gradients(flat) / wire.world


def _once(position: int, num: int) -> bool:
    """After the last micro-batch of a window."""
    return position == num - 1


def every(position: int, num: int) -> bool:
    """Synchronise after each micro-batch.

    Args:
        position: Number of the micro-batch.
        num: Micro-batches of a window.

    Returns:
        True.
    """
    return True


def _halfway(position: int, num: int) -> bool:
    """Synchronise after micro-batch N/2: the rest of the window stays on its rank."""
    return position == num // 2 - 1


def _never(position: int, num: int) -> bool:
    """After none: every rank steps on its own share."""
    return False


def _manual_sync(wire: Wire, num: int, split: Split, *, divisor: OverRanks, reduction: OverRanks, when: SyncRule) -> Recipe:
    """The recipe whose running sum of gradients is combined over the ranks after the micro-batches that `when` names."""

    def synchronise(arm: Arm) -> None:
        if when(arm.position, len(arm.seen)):
            for p in arm.model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            gradients = [p.grad for p in arm.model.parameters() if p.grad is not None]
            vector_to_parameters(reduction(wire, parameters_to_vector(gradients)), gradients)

    return Recipe(
        accumulation_steps=num,
        split=partial(sizes, num, split),
        normalise=partial(_divided, wire, divisor),
        after_backward=(synchronise,),
    )


def _with_ddp(wire: Wire, num: int, split: Split, *, divisor: OverRanks, when: SyncRule) -> Recipe:
    """The recipe in which `DistributedDataParallel` averages in the backwards that `when` names, and in no others (`no_sync`)."""

    def counted(bucket: Any) -> torch.futures.Future[Tensor]:
        wire.count(bucket.buffer())
        return allreduce_hook(dist.distributed_c10d._get_default_group(), bucket)

    def forward(arm: Arm, micro_batch: Batch) -> Tensor:
        if "ddp" not in arm.memory:
            arm.memory["ddp"] = DistributedDataParallel(arm.model)
            arm.memory["ddp"].register_comm_hook(None, lambda _state, bucket: counted(bucket))  # DDP checks names and annotations
        model = arm.memory["ddp"]
        model.require_backward_grad_sync = when(arm.position, len(arm.seen))  # all that `no_sync` does
        outputs: Tensor = model(micro_batch.inputs)
        return outputs

    return Recipe(
        accumulation_steps=num, split=partial(sizes, num, split), normalise=partial(_divided, wire, divisor), forward=forward
    )


def _divided(wire: Wire, divisor: OverRanks, terms: Sequence[Tensor], num: int) -> Sequence[Tensor]:
    return [divisor(wire, torch.stack(list(terms)).sum())] * len(terms)


RIGHT: Mapping[str, Way] = {
    "sum_over_window_terms": partial(_manual_sync, divisor=Wire.sum_terms, reduction=Wire.sum_gradients, when=_once),
    "mean_of_scaled": partial(_manual_sync, divisor=_scaled_terms, reduction=averaged, when=_once),
    "mean_every_micro_batch": partial(_manual_sync, divisor=_scaled_terms, reduction=averaged, when=every),
    "ddp": partial(_with_ddp, divisor=_scaled_terms, when=_once),
    "ddp_every_backward": partial(_with_ddp, divisor=_scaled_terms, when=every),
}
# F15, fairseq#494, transformers#34242; the last is right where all ranks have as many loss terms.
SCALED: Mapping[str, Way] = {
    "summed_not_averaged": partial(_manual_sync, divisor=_scaled_terms, reduction=Wire.sum_gradients, when=_once),
    "averaged_twice": partial(_manual_sync, divisor=Wire.sum_terms, reduction=averaged, when=_once),
    "mean_of_local_means": partial(_manual_sync, divisor=_own_terms, reduction=averaged, when=_once),
}
# F16, FunASR#3472, build-nanogpt#30; the last two need more than one micro-batch.
UNSYNCHRONISED: Mapping[str, Way] = {
    "never_synchronised": partial(_manual_sync, divisor=_own_terms, reduction=averaged, when=_never),
    "synchronised_halfway": partial(_manual_sync, divisor=_scaled_terms, reduction=averaged, when=_halfway),
    "ddp_synchronised_halfway": partial(_with_ddp, divisor=_scaled_terms, when=_halfway),
}


# Shares ----------------------------------------------------------------------------------------------------------------------


def sizes(num: int, split: Split, num_samples: int) -> list[int]:
    """Sizes of `num` parts: even ones differ by one sample at most, ragged ones rise.

    Args:
        num: Micro-batches.
        split: How they are cut.
        num_samples: Samples of the rank.

    Returns:
        [num] sizes that add up to `num_samples`.

    Raises:
        ConfigError: A part would be empty.
    """
    if num_samples < num:
        raise ConfigError("accumulation_steps", num, f"at most the {num_samples} samples of the smallest rank's share")
    if split == Split.ragged:
        return Ragged(num, num_samples)(num_samples)
    return [num_samples * (k + 1) // num - num_samples * k // num for k in range(num)]


def whole_windows(setting: Setting) -> list[Tensor]:
    """Return the windows of a trial that have the full number of samples.

    Args:
        setting: The setting of the trial.

    Returns:
        [B] int64 ids of each.
    """
    return list(setting.windows(last=LastWindow.drop))


def micro_batches(config: TrialConfig, world: int, num: int) -> list[list[int]]:
    """Return how a window is cut into micro-batches on several ranks.

    Args:
        config: The trial.
        world: Number of ranks.
        num: Number of micro-batches of a rank.

    Returns:
        Samples of each rank's micro-batches, in the order of the window.
    """
    return [sizes(num, config.split, share) for share in sizes(world, config.split, config.effective_batch)]


# One rank --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one rank did, window by window."""

    gradients: list[Vector]  # [P] each, as its optimizer consumed them
    parameters: list[Vector]  # [P] each, after the step
    wire: Wire


def train(setting: Setting, way: Way, num: int, rank: int, world: int) -> Trace:
    """This rank's share of the training, from the trial's initial weights.

    Args:
        setting: The trial's task, initial weights and windows.
        way: How ranks synchronise.
        num: Micro-batches of a window.
        rank: Number of this rank.
        world: Number of ranks.

    Returns:
        Weights and gradients of each step.
    """
    config, wire = setting.config, Wire(world=world)
    arm = setting.arm(way(wire, num, config.split), precision=Precision.float64, clip_norm=None)
    watch = Watch(arm)
    trace = Trace(gradients=[], parameters=[], wire=wire)
    for t, ids in enumerate(whole_windows(setting)):
        own = ids.split(sizes(world, config.split, len(ids)))[rank]
        watch.start_window()
        with setting.randomness(t, rank):
            take_step(arm, setting.exact.batch(own))
        assert watch.gradient is not None
        trace.gradients.append(watch.gradient.numpy())
        trace.parameters.append(flatten(arm.model.parameters()).numpy())
    return trace


def _serve(rank: int, world: int, folder: str, setting: bytes, link: Connection) -> None:
    """The main function of a rank's process: join the others, answer jobs until there are none, or until one fails."""
    processes.die_with_parent()
    torch.set_num_threads(1)
    store = f"file://{Path(folder) / 'store'}"  # a file, so no port has to be free
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    own: Setting = pickle.loads(setting)
    try:
        while (job := link.recv()) is not None:
            way, num = job
            try:
                answer: Any = train(own, way, num, rank, world)
            except Exception:
                answer = traceback.format_exc()
            link.send_bytes(pickle.dumps(answer))
            if isinstance(answer, str):
                return  # whoever waits for this rank in a collective sees the connection closed
    except (EOFError, OSError):  # the parent is gone
        return
    dist.destroy_process_group()


# All ranks -------------------------------------------------------------------------------------------------------------------


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer."""


@dataclass
class Ranks:
    """The processes of a trial on several ranks; they end with the context, and with the process that opened it."""

    setting: Setting
    world: int
    links: list[Connection] = field(default_factory=list)
    processes: list[BaseProcess] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])  # of no effect in a trial, whose own server has torch imported
        setting = pickle.dumps(self.setting)  # the pickler of multiprocessing would share the tensors' memory
        try:
            for rank in range(self.world):
                mine, theirs = context.Pipe()
                self.links.append(mine)
                process = context.Process(target=_serve, args=(rank, self.world, self.folder.name, setting, theirs), daemon=True)
                with processes.interrupts_blocked():
                    process.start()
                theirs.close()
                self.processes.append(process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        processes.end(self.links, self.processes)
        self.folder.cleanup()

    def run(self, way: Way, num: int) -> list[Trace]:
        """Train all ranks together, `num` micro-batches each. `RankFailed` with what every failed rank said."""
        with suppress(OSError):  # a rank that is gone is reported below
            for link in self.links:
                link.send((way, num))
        answers = [self._answer(link) for link in self.links]
        errors = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
        if errors:
            raise RankFailed("\n".join(errors))
        return [answer for answer in answers if isinstance(answer, Trace)]

    def _answer(self, link: Connection) -> Trace | str:
        try:
            if not link.poll(TIMEOUT_S):
                return f"no answer within {TIMEOUT_S:.0f} s"
            # From a process of ours, through a pipe that has no name: nobody else can write to it.
            answer: Trace | str = pickle.loads(link.recv_bytes())
        except (EOFError, OSError):
            return "ended without an answer"
        return answer
