"""What a process of its own would start with, and take with it: each run of somebody's code gets it anew."""

from __future__ import annotations

import io
import logging
import multiprocessing.context
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

from accumulation_harness.audit.user_code.imports import replaced
from accumulation_harness.observe.patches import Wrap, group_stays
from accumulation_harness.system.packages import HAS_TORCH

VALUES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (  # that a run may set by a call: how they are read and set
    (os.getcwd, os.chdir),
    (random.getstate, random.setstate),
    (lambda: logging.root.level, logging.root.setLevel),
)
if HAS_TORCH:
    import torch

    VALUES += (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (lambda: None, torch.set_default_device),
    )

END_SECONDS = 5.0  # for each function that a run wants to be called at its end
_CONTEXT = multiprocessing.context._default_context
ATTRIBUTES: tuple[tuple[Any, str], ...] = (  # that a run may set: of what
    *((sys, name) for name in ("argv", "stdin", "stdout", "stderr", "dont_write_bytecode")),
    (_CONTEXT, "_actual_context"),  # the start method
)


@contextmanager
def of_its_own(is_own: Callable[[ModuleType], bool]) -> Iterator[None]:
    """Put Python's state back afterwards, run what the audited modules want done at exit, and answer no `input()`.

    Args:
        is_own: Whether a module belongs to the audited code.
    """
    with _state_of_python(), _ends(is_own) as at_end:
        changes: dict[str, dict[str, Wrap]] = {
            "atexit": {"register": at_end},
            "torch.utils.data.dataloader": {"_MultiProcessingDataLoaderIter.__init__": _one_worker},
            "torch.distributed": {"init_process_group": _made_once, "destroy_process_group": group_stays},
        }
        with replaced(changes):
            yield


@contextmanager
def _state_of_python() -> Iterator[None]:
    """What a run may set of this process, from its command line to torch's defaults; nobody answers what it asks."""
    attributes = [(owner, name, getattr(owner, name)) for owner, name in ATTRIBUTES]
    values = [(put, get()) for get, put in VALUES]
    path, main, handlers = [*sys.path], sys.modules["__main__"], [*logging.root.handlers]
    is_main = threading.current_thread() is threading.main_thread()
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()} if is_main else {}
    sys.stdin = _Nobody()
    try:
        with warnings.catch_warnings(), patch.dict(os.environ):
            yield
    finally:
        for owner, name, value in attributes:
            setattr(owner, name, value)
        for put, value in values:
            put(value)
        sys.path[:], sys.modules["__main__"], logging.root.handlers[:] = path, main, handlers
        if is_main and hasattr(signal, "alarm"):
            signal.alarm(0)
        for number, handler in signals.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


class _Nobody(io.StringIO):
    """In the place of standard input."""

    def readline(self, *_: Any) -> NoReturn:
        raise EOFError(
            "the code asks for input, and during an audit nobody answers: take the answer from an argument or the environment"
        )

    read = __next__ = readline


@contextmanager
def _ends(is_own: Callable[[ModuleType], bool]) -> Iterator[Wrap]:
    """What takes the place of `atexit.register`: what one's own modules register is called at the end of the run."""
    todo: list[Callable[[], Any]] = []

    def register(original: Wrap, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        module = sys.modules.get(sys._getframe(2).f_globals.get("__name__", ""))  # 1 is where functions are replaced
        if module is not None and is_own(module):
            todo.append(partial(function, *args, **kwargs))
        else:
            original(function, *args, **kwargs)
        return function

    try:
        yield register
    finally:
        for function in reversed(todo):
            ending = threading.Thread(target=partial(_called, function), daemon=True)
            ending.start()
            ending.join(END_SECONDS)  # one that waits for a thread of the run would wait for ever


def _called(function: Callable[[], Any]) -> None:
    with suppress(Exception):
        function()


def _one_worker(original: Wrap, self: Any, loader: Any) -> None:
    """Of several workers each draws for batches of its own: how a batch is cut would say what becomes of a sample.

    A forked one starts in no time, with the samples and seeds of one that imports everything anew.
    """
    before, workers = loader.multiprocessing_context, loader.num_workers
    loader.num_workers = 1
    if sys.platform == "linux" and not torch.cuda.is_initialized():
        loader.multiprocessing_context = "fork"
    try:
        original(self, loader)
    finally:
        loader.num_workers = workers
        loader.multiprocessing_context = before


def _made_once(original: Wrap, *args: Any, **kwargs: Any) -> Any:
    """The group of all processes is made by the first run, and kept: libraries hold on to it."""
    if torch.distributed.is_initialized():
        return group_stays(original, *args, **kwargs)
    return original(*args, **kwargs)
