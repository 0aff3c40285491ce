"""One trial in a process of its own, which takes nothing with it when it raises, exits, crashes or is killed.

Children come from a forkserver that has torch imported: about 0.05 s each, and no state of the parent, which does not import it.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from accumulation_harness.config import ConfigError, HarnessConfig, NotReproducible
from accumulation_harness.config.identity import identity
from accumulation_harness.results import tracking
from accumulation_harness.results.store import State, Store, StoreWarning, TrialTaken
from accumulation_harness.system.files import keep_others_out
from accumulation_harness.system.processes import die_with_parent, interrupts_blocked
from accumulation_harness.system.terminal import one_line, suggesting

TrialFunction = Callable[[HarnessConfig], None]

SAFE_PATH, OURS = "PYTHONSAFEPATH", "forkserver"  # any text switches it on
PRELOAD: tuple[str, ...] = ("accumulation_harness.sweep.preloaded",)  # imported once, before the first child
MOST_WARNINGS = 3  # of one trial that are shown
LINGER_SECONDS = 5.0  # of a process whose results are stored, after its mirror should have been closed
OUTPUT_TAIL = 8192  # characters of a traceback, or of a dead child's output, that are kept
LINE_LENGTH = 300  # characters of a line of either in the terminal
UNTOLD = 255  # exit code that multiprocessing reports for a child of a forkserver that is gone


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A trial that did not finish: `summary` in one line, `details` the traceback or the last output."""

    trial: str
    summary: str
    details: str
    is_bad_input: bool = False


class Cell(NamedTuple):
    """A trial to be run, and where: its store and its name there."""

    config: HarnessConfig
    store: Store
    trial: str

    @property
    def folder(self) -> Path:
        """Where the trial's results lie, or will."""
        return self.store.folder(self.config.experiment, self.trial)

    def is_finished(self) -> bool:
        """Whether its results are there, undamaged, and of the code and data that are there now."""
        return self.store.finished(self.config.experiment, self.trial)


class Done(NamedTuple):
    """A trial that was run to its end."""

    warnings: tuple[str, ...] = ()  # of the store and the mirror: what was set aside, what was not mirrored


class RunsElsewhere(NamedTuple):
    """A trial that another process had when ours was started: it runs it (`running`), or has run it (`finished`)."""

    state: State


@dataclass(kw_only=True)
class Child:
    """One trial's process, the pipe of its report and the file of what it prints."""

    cell: Cell
    process: BaseProcess
    report: Connection
    output: Path
    gpu: str | None = None  # the only one that it sees; None where it sees all
    server: int  # the forkserver that started it
    started: float = field(default_factory=time.monotonic)
    stored: float = math.inf  # when its results were first seen
    is_told: bool = False  # that half of its time has passed
    is_over: bool = False  # all of it has

    @classmethod
    def start(cls, cell: Cell, run: TrialFunction, threads: int, gpu: str | None = None) -> Child:
        """Start the process that measures a trial.

        Args:
            cell: The trial.
            run: What the process calls.
            threads: How many threads it computes on.
            gpu: The only GPU that it sees; None leaves CUDA_VISIBLE_DEVICES as it is.

        Returns:
            The process under way.

        Raises:
            EOFError: No process could be started, as where the forkserver was killed.
            OSError: The system refused a process or a temporary file.
        """
        start_forkserver()  # again, where it was killed
        report, child_report = multiprocessing.Pipe(duplex=False)
        descriptor, output = tempfile.mkstemp(prefix="output-")
        os.close(descriptor)
        process = multiprocessing.get_context("forkserver").Process(
            target=_child_main, args=(run, cell.config, threads, gpu, child_report, output), name=cell.trial
        )
        process.start()
        child_report.close()
        return cls(cell=cell, process=process, report=report, output=Path(output), gpu=gpu, server=_server())

    def look(self) -> str:
        """Kill the process where it must hang.

        Its time is over, or its results were stored long ago, as where W&B's process is stopped.

        Returns:
            A sentence once half of its time has passed; else an empty text.
        """
        now, limit = time.monotonic(), self.cell.config.trial_seconds or math.inf
        if self.stored == math.inf and (self.cell.folder / "trial.json").exists():
            self.stored = now
        self.is_over = self.stored == math.inf and now > self.started + limit
        if self.is_over or now > self.stored + tracking.finish_seconds(self.cell.config.tracking.mode) + LINGER_SECONDS:
            self.process.kill()
        if self.is_told or now < self.started + limit / 2:
            return ""
        self.is_told = True
        return f"{self.cell.trial}: half of trial_seconds={limit:g} has passed"

    def end(self) -> Done | RunsElsewhere | Failure:
        """What became of a process that is no longer alive."""
        self.process.join()
        report: object = None
        with suppress(EOFError):
            report = self.report.recv() if self.report.poll() else None
        tail = self.output.read_bytes()[-OUTPUT_TAIL:].decode(errors="replace")
        self.close()
        if isinstance(report, (Done, RunsElsewhere, Failure)):
            return report
        if self.is_over:
            told = f"no end after trial_seconds={self.cell.config.trial_seconds:g}"
            printed, _, calls = tail.rpartition("(most recent call first):")  # faulthandler begins with the innermost
            return Failure(trial=self.cell.trial, summary=told, details="\n".join((printed, *reversed(calls.splitlines()))))
        code = self.process.exitcode
        if code == UNTOLD and _is_gone(self.server):  # which would have told; its children die with it, at once or a little later
            return RunsElsewhere(State.running)
        return Failure(trial=self.cell.trial, summary=_describe_exit(UNTOLD if code is None else code), details=tail)

    def close(self) -> None:
        """Close the pipe, and remove what was printed."""
        self.report.close()
        self.output.unlink(missing_ok=True)


def _describe_exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "killed by SIGKILL (by hand, or out of memory)"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code} before it was finished"


def _child_main(
    run: TrialFunction, config: HarnessConfig, threads: int, gpu: str | None, report: Connection, output: str
) -> None:
    """Run one trial and report how it ended; a crash shows as a process that ends without a report."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):  # also what libraries print; the parent's terminal belongs to the progress bar
        os.dup2(descriptor, number)
    os.close(descriptor)
    if os.environ.get(SAFE_PATH) == OURS:
        del os.environ[SAFE_PATH]  # what the trial starts is not ours
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # read when CUDA starts, which nothing preloaded has done
    faulthandler.enable()
    if config.trial_seconds:
        faulthandler.dump_traceback_later(config.trial_seconds / 2)  # into the output: where it hangs, most likely
    keep_others_out()  # what wandb writes too; the forkserver may be older than our own umask
    die_with_parent()
    if torch := sys.modules.get("torch"):  # preloaded
        torch.set_num_threads(threads)
    report.send(_attempt(run, config))
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(0)  # threads that are left, as those of data loaders, would go on


def _attempt(run: TrialFunction, config: HarnessConfig) -> Done | RunsElsewhere | Failure:
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            run(config)
        ours = [w for w in seen if issubclass(w.category, (StoreWarning, tracking.TrackingWarning, NotReproducible))]
        return Done(tuple(str(w.message)[:LINE_LENGTH] for w in ours[:MOST_WARNINGS]))
    except TrialTaken as taken:
        return RunsElsewhere(taken.state)
    except ConfigError as error:
        return _failure(config, suggesting(str(error)), is_bad_input=True)
    except SystemExit as error:
        return _failure(config, f"called sys.exit({error.code!r})")
    except BaseException as error:
        return _failure(config, f"{type(error).__name__}: {error}")


def _failure(config: HarnessConfig, summary: str, is_bad_input: bool = False) -> Failure:
    """About the exception in flight, cut to what fits into a pipe: the parent reads the report after the child has ended."""
    first = next(iter(summary.splitlines()), "")
    return Failure(
        trial=identity(config.trial),
        summary=one_line(first) if is_bad_input else first[:LINE_LENGTH],
        details=traceback.format_exc()[-OUTPUT_TAIL:],
        is_bad_input=is_bad_input,
    )


def start_forkserver() -> None:
    """Start the fork server, which ignores Ctrl-C as its children do and imports no `harness.py` of the working directory."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    with interrupts_blocked(), _working_directory_unseen():
        forkserver.ensure_running()


@contextmanager
def _working_directory_unseen() -> Iterator[None]:
    """A Python that is started inside finds no module in the working directory."""
    if SAFE_PATH in os.environ:
        yield
        return
    os.environ[SAFE_PATH] = OURS
    try:
        yield
    finally:
        del os.environ[SAFE_PATH]


@contextmanager
def forkserver_at_work(*, start: bool) -> Iterator[None]:
    """Start the forkserver now or not, and leave none behind: while it imports it would hold our output open for seconds.

    Args:
        start: Whether trials will be started, so that it can import meanwhile.

    Yields:
        Nothing.
    """
    if start:
        start_forkserver()
    try:
        yield
    finally:
        if pid := _server():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _server() -> int:
    """The forkserver's process; 0 where there is none."""
    return forkserver._forkserver._forkserver_pid or 0  # type: ignore[attr-defined] # there is no public name for it


def _is_gone(process: int) -> bool:
    """Whether a child of ours has ended. A process closes its pipes, by which we learn of its end, a moment before it ends."""
    import psutil

    deadline = time.monotonic() + 1.0
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True
