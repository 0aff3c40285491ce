"""One call of a training function: which, with what arguments and interventions, and watched."""

from __future__ import annotations

import gc
import inspect
import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from accumulation_harness.audit.evidence import WATCH, Intervention, Run
from accumulation_harness.audit.observe.handed import EnoughSteps, HandRecorder, Most
from accumulation_harness.config.targets import import_file
from accumulation_harness.system.packages import HAS_TORCH

Train = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of the training function."""

    batch_size: int
    accumulation_steps: int
    intervention: Intervention = WATCH
    options: Mapping[str, Any] = field(default_factory=dict)  # `dtype`, `order_seed`
    independent: bool = False  # the function given as `reference`
    most: Most = field(default_factory=Most)  # optimizer steps after which the run is ended
    total: bool = False  # whether the function takes the samples of a whole optimizer step, and cuts them itself
    apart: bool = False  # whether evaluations leave no trace on the random numbers of training


QUICK = 1.0  # seconds of the processor; a collection of garbage takes a tenth of that


class Functions(ABC):
    """What jobs call, the audited function or the independent one, and where: in this process, or on several ranks."""

    def __init__(self, train: Train, reference: Train | None) -> None:
        self.functions = {False: train, True: reference}

    def accepts(self, name: str, *, independent: bool = False) -> bool:
        """Whether the function (or the independent one) has a parameter of that name."""
        return _accepts(self.functions[independent], name)

    @abstractmethod
    def run(self, job: Job) -> list[Run]:
        """The evidence of every rank."""

    def watched(self, job: Job, *, collect: bool = True) -> Run:
        """One call of that which the job asks for, in this process."""
        function = self.functions[job.independent]
        assert function is not None
        return watch(function, job, collect=collect)


class Local(Functions):
    """Runs jobs in this process."""

    quick = True  # whether the run before was over soon, and so has left little behind

    def run(self, job: Job) -> list[Run]:
        """The evidence of every rank; here of one."""
        began, quick = time.process_time(), self.quick
        run = self.watched(job, collect=not quick)
        self.quick = time.process_time() - began < QUICK
        return [run]


def double() -> Any:
    """Name float64 as a function takes it.

    Returns:
        torch's dtype where torch is installed, else NumPy's.
    """
    if not HAS_TORCH:
        return np.dtype("float64")
    import torch

    return torch.float64


def failed(job: Job, error: str) -> Run:
    """Make the run of a job that failed.

    Args:
        job: What was asked for.
        error: Why nothing came of it.

    Returns:
        A run without tracks.
    """
    return Run(batch_size=job.batch_size, accumulation_steps=job.accumulation_steps, error=error)


def _accepts(function: Train | None, name: str) -> bool:
    """Whether the function has a parameter of that name."""
    return function is not None and name in inspect.signature(function).parameters


def watch(train: Train, job: Job, *, collect: bool = True) -> Run:
    """Call a training function once, watched, from the same generator state each time; the caller's generators are put back.

    Args:
        train: The function.
        job: Its two numbers, and what to look at.
        collect: Whether to free first what an earlier run has left behind.

    Returns:
        What was seen; what the function raised is in its `error`.

    Raises:
        KeyboardInterrupt: The user ended the audit.
    """
    if collect:
        gc.collect()
    run = Run(batch_size=job.batch_size, accumulation_steps=job.accumulation_steps)
    try:
        with this_process_goes_on(), _recorded(run, train, job) as recorder:
            recorder.returned(_call(train, job, recorder))
    except KeyboardInterrupt:
        raise
    except EnoughSteps:
        run.stopped = True
    except BaseException as error:
        run.error = run.error or described(error, train)  # ours, which came first, may be why
    return run


def _recorded(run: Run, train: Train, job: Job) -> AbstractContextManager[HandRecorder]:
    """What watches the call: the hooks of torch as well, where it is installed."""
    if not HAS_TORCH:
        return HandRecorder(run, job.intervention, job.most)
    from accumulation_harness.audit.observe.torch_run import recorded

    namespaces = [train.__globals__] if hasattr(train, "__globals__") else []
    return recorded(run, job.intervention, namespaces, job.most, apart=job.apart)


def _call(train: Train, job: Job, recorder: HandRecorder) -> Any:
    """By name where the function has these names, by position where it has others."""
    options = dict(job.options)
    options |= {name: recorder.hand for name in ("hand", "weights") if _accepts(train, name)}
    taken = job.batch_size * (job.accumulation_steps if job.total else 1)
    sizes = {"batch_size": taken, "accumulation_steps": job.accumulation_steps}
    parameters = inspect.signature(train).parameters.values()
    if all(_accepts(train, name) for name in sizes) or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return train(**sizes, **options)
    return train(*sizes.values(), **options)


class ProcessEnded(SystemExit):
    """Somebody called `os._exit`, which would have ended the whole process without a word."""


@contextmanager
def this_process_goes_on() -> Iterator[None]:
    """`os._exit` raises here, and a copy of this process (`os.fork`) that leaves the block instead of ending ends."""
    process, end = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process or os._exit is not refuse:  # a copy; or somebody kept this function for later
            end(status)
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit(status)  # of this very class: of any other a thread prints a traceback
        raise ProcessEnded(f"os._exit({status})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = end
        if os.getpid() != process:
            end(0)


OURS = str(Path(__file__).parents[1])  # the folder of the audit


def described(error: BaseException, train: Train | None = None) -> str:
    """The exception in one line, with the place in the audited code: in the file of `train`, if it came through there.

    Args:
        error: What was raised.
        train: The audited function, if the place is to be in its file.

    Returns:
        `TYPE: MESSAGE (FILE:LINE)`.
    """
    every = traceback.extract_tb(error.__traceback__)
    said = " ".join("".join(traceback.format_exception_only(error)).split())
    if every and every[-1].filename.startswith(OURS) and _is_out_of_memory(error):
        return f"{said}; the audit ran out of memory, not the function: it keeps vectors of every optimizer step"
    file = getattr(getattr(train, "__code__", train), "co_filename", getattr(train, "file", None))
    frames = [frame for frame in every if not frame.filename.startswith(OURS)]
    own = [frame for frame in frames if frame.filename == str(file)] or frames
    return said + (f" ({own[-1].filename}:{own[-1].lineno})" if own else "")


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def load_module(file: Path) -> Any:
    """The file as a module of its own name, read anew.

    Args:
        file: A Python file.

    Returns:
        The module.
    """
    return import_file(file, f"audited_{file.stem}")
