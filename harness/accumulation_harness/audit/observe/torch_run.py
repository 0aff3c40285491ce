"""What of torch a run stands in: its recorder, generators and threads, deterministic kernels, the arithmetic asked for."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from accumulation_harness.audit.evidence import Intervention, Run
from accumulation_harness.audit.observe.handed import Most
from accumulation_harness.audit.observe.layers import RoundedOnce
from accumulation_harness.audit.observe.recorder import Recorder
from accumulation_harness.observe.patches import Patches
from accumulation_harness.system import accelerator


@contextmanager
def recorded(
    run: Run, intervention: Intervention, namespaces: Iterable[dict[str, Any]], most: Most, *, apart: bool
) -> Iterator[Recorder]:
    """Watch what is called inside; generators and the number of threads are put back afterwards.

    Args:
        run: Gets the evidence.
        intervention: What is done to the run, besides watching it.
        namespaces: Of functions that may have imported what is replaced.
        most: Steps after which the run is ended.
        apart: Whether evaluations leave no trace on the random numbers of training.

    Yields:
        The recorder, which takes what is handed over.

    Raises:
        EnoughSteps: A step began after `most` of them.
    """
    restore, threads = standing_now(), torch.get_num_threads()
    try:
        recording, aside = Recorder(run, intervention, namespaces, most), evaluations_apart() if apart else nullcontext()
        with _repeatable(), aside, recording as recorder, _arithmetic(intervention):
            yield recorder
    finally:
        restore()
        torch.set_num_threads(threads)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Deterministic kernels where there is a GPU and the caller has no mode: atomics would make two runs of a right loop differ.

    An operation that has none runs as ever, unsaid: the two runs that the audit compares show what it does.
    """
    if torch.get_deterministic_debug_mode() or not accelerator.is_available():
        yield
        return
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have a deterministic implementation")
            yield
    finally:
        torch.set_deterministic_debug_mode("default")


def _arithmetic(what: Intervention) -> AbstractContextManager[Any]:
    """The one that the intervention asks for; and what a checkpoint computes again is seen to its end."""
    if what.place is not None:
        return set_checkpoint_early_stop(False)
    return RoundedOnce() if what.rounded_once else nullcontext()  # type: ignore[no-untyped-call]


def standing_now() -> Callable[[], None]:
    """What puts the shared generators back to where they are now, also that of a GPU which is used for the first time since.

    Returns:
        A function that puts them back.
    """
    of_python, of_numpy, of_torch, seed = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.initial_seed()
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)
        elif torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)  # with which CUDA begins: torch seeds both alike

    return restore


@contextmanager
def evaluations_apart() -> Iterator[None]:
    """Put the generators back whenever a model goes from `eval()` to `train()`, so that evaluations draw nothing."""
    held = dict[int, Callable[[], None]]()
    inside = False  # a module hands the call on to its children

    def train(original: Callable[..., Any], module: nn.Module, mode: bool = True) -> Any:
        nonlocal inside
        if inside:
            return original(module, mode)
        inside = True
        try:
            if not mode and module.training:
                held[id(module)] = standing_now()
            elif mode and not module.training and (restore := held.pop(id(module), None)) is not None:
                restore()
            return original(module, mode)
        finally:
            inside = False

    patches = Patches()
    patches.replace({(nn.Module, "train"): train})
    try:
        yield
    finally:
        patches.restore()
