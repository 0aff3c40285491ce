"""Many trials: in parallel, each in a child process of its own; finished ones are skipped, so the same command resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

from accumulation_harness.config import (
    TUNING_SEEDS,
    ConfigError,
    Device,
    HarnessConfig,
    Model,
    Precision,
    TrialConfig,
    targets,
    to_dict,
)
from accumulation_harness.config.identity import identity
from accumulation_harness.results import sweeps, tracking
from accumulation_harness.results.measurements import Measurements
from accumulation_harness.results.mirror import Mirror
from accumulation_harness.results.record import in_one_line, summarised
from accumulation_harness.results.store import MOST_BYTES, State, Store
from accumulation_harness.sweep import ending, tuning
from accumulation_harness.sweep.child import (
    LINE_LENGTH,
    Cell,
    Child,
    Done,
    Failure,
    RunsElsewhere,
    TrialFunction,
    start_forkserver,
)
from accumulation_harness.sweep.progress import Kind, Progress, TimeLeft
from accumulation_harness.system import driver, opened, processes

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL

STOP_SECONDS = 8  # between a signal and the end of the command, whatever hangs
MOST_STARTS = 3  # of a trial's process, where the forkserver is killed meanwhile
RETRY_SECONDS = 2.0  # how often a trial that another process runs is looked at


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the trials that were asked for."""

    done: int  # run to their end now
    skipped: int  # were finished before, or by another process meanwhile
    failures: tuple[Failure, ...] = ()

    def and_then(self, later: Outcome) -> Outcome:
        """Of both together."""
        return Outcome(done=self.done + later.done, skipped=self.skipped + later.skipped, failures=self.failures + later.failures)

    @property
    def is_bad_input(self) -> bool:
        """Whether every failure was a setting that only the data could refute."""
        return bool(self.failures) and all(failure.is_bad_input for failure in self.failures)

    def raise_failures(self) -> None:
        """Raise TrialsFailed where a trial has failed."""
        if self.failures:
            raise TrialsFailed(self)


class TrialsFailed(RuntimeError):
    """Some trials failed; each has been reported, and the others are done."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome

    def __str__(self) -> str:
        return f"{len(self.outcome.failures)} trials failed"


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP: the children are stopped, finished trials are safe."""

    def __init__(self, number: int, done: int, total: int) -> None:
        super().__init__(f"Stopped: {done} of {total} trials are done; the same command resumes.")
        self.signal = number


def run_one(config: HarnessConfig) -> None:
    """Run a trial into the store and its W&B mirror.

    Args:
        config: The settings of the trial.

    Raises:
        TrialTaken: Another process has it, or it is finished.
    """
    from accumulation_harness.measure import studies

    opened.follow()
    trial, started = resolved(config).trial, time.monotonic()
    name = identity(trial)
    with (
        Store(config.results).open_trial(trial.experiment, name, to_dict(trial)) as writer,
        Mirror(config.tracking, trial, name=name, folder=writer.folder) as mirror,
    ):

        def on_step(step: int, rows: list[dict[str, Any]]) -> None:
            writer.add(*rows)
            mirror.log(step, rows)

        shared = Measurements(Path(config.results), f"{trial.experiment}/{name}")
        record = studies.run(trial, on_step, shared)
        phases = record["seconds"]
        phases["other"] = time.monotonic() - started - sum(phases.values())
        writer.finish({**record, **opened.recorded(Path(config.results))})
        mirror.finish(record)


# Parent ------------------------------------------------------------------------------------------------------------------------


Conclude = Callable[[Sequence[Cell], Sequence[Failure]], None]
Announce = Callable[[int, int], str]  # (trials to be run, how many at once) -> what is said before the first


def run_many(
    configs: Sequence[HarnessConfig],
    run: TrialFunction | None = None,
    conclude: Conclude | None = None,
    announce: Announce | None = None,
) -> Outcome:
    """Run each distinct trial that is not finished, in a child process each.

    Trials that choose a learning rate come first; those that judge train each arm at its chosen rate alone (`tuning`). It
    returns when all have ended, also those that another process on the same store runs.

    Args:
        configs: The trials; the same settings twice are one trial.
        run: Measures one trial, a function of a module; unless given, what its study says.
        conclude: Prints what the trials say; unless given, their verdicts.
        announce: Says, where there is something to run, what is.

    Returns:
        How many trials were done, were finished already, and failed, with the failures.

    Raises:
        ConfigError: Before the first trial starts: the results cannot be written, or W&B is not reachable.
        Interrupted: SIGINT, SIGTERM or SIGHUP came; the children are stopped.
    """
    cells, groups = tuning.split(_distinct(configs))
    outcome = _run(cells, run, announce)
    if groups:
        judging = list({cell.folder: cell for group in groups for cell in group.worth_judging()}.values())
        chosen = f"Learning rates were chosen on seeds from {TUNING_SEEDS} on"
        said = f"{chosen}; {_trials(len(judging))} judge on the other seeds, at these rates alone."
        print(said, file=sys.stderr, flush=True)
        outcome, cells = outcome.and_then(_run(judging, run)), cells + judging
    (conclude or _print_ending)(cells, outcome.failures)
    return outcome


def _run(cells: Sequence[Cell], run: TrialFunction | None, announce: Announce | None = None) -> Outcome:
    standings = [(cell, cell.store.standing(cell.config.experiment, cell.trial)) for cell in cells]
    todo = [cell for cell, standing in standings if standing.state != State.finished]
    skipped = len(cells) - len(todo)
    for line in summarised([f"{one.trial}: {one.detail}" for _, one in standings if one.state == State.stale], "run again"):
        print(in_one_line(line), file=sys.stderr)
    if not todo:
        print(f"Nothing to do: {_trials(len(cells))} finished already.")
        return Outcome(done=0, skipped=skipped)
    for tracking_config in dict.fromkeys(cell.config.tracking for cell in todo):
        tracking.check(tracking_config)
    places = _places(cells[0].config)
    for store in {cell.store.root: cell.store for cell in cells}.values():
        sweeps.announce(store.root, [f"{cell.config.experiment}/{cell.trial}" for cell in cells if cell.store.root == store.root])
    threads = _num_threads(cells, len(places))
    if announce is not None:
        print(announce(len(todo), len(places)), file=sys.stderr, flush=True)
    with _caught_signals() as caught, Progress(total=len(cells), skipped=skipped) as progress:
        start_forkserver()
        queue = deque(_longest_first(todo))
        pool = _Pool(run=run or run_one, places=places, threads=threads, progress=progress, todo=queue, skipped=skipped)
        try:
            while pool.is_busy and not caught.signals:
                pool.start_children()
                pool.wait(caught.readable)
        finally:
            pool.stop()
    if caught.signals:
        raise Interrupted(caught.signals[0], pool.skipped + pool.done, len(cells))
    outcome = Outcome(done=pool.done, skipped=pool.skipped, failures=tuple(pool.failures))
    print(f"{_trials(outcome.done)} done, {outcome.skipped} finished already, {len(outcome.failures)} failed.")
    return outcome


def announce_elsewhere(configs: Sequence[HarnessConfig]) -> None:
    """Say, before a sweep whose trials other processes run, how to see where they stand.

    Args:
        configs: The trials, at least one.
    """
    root = configs[0].results
    print(f"{_trials(len(configs))} handed to the launcher; meanwhile: accumulation-harness status --results {root}", flush=True)


def conclude(configs: Sequence[HarnessConfig], failures: Sequence[Failure]) -> Outcome:
    """End a sweep whose trials ran in other processes than ours, on this machine or another.

    Args:
        configs: The trials.
        failures: Those that failed.

    Returns:
        How many were done and failed.
    """
    cells = _distinct(configs)
    outcome = Outcome(done=len(cells) - len(failures), skipped=0, failures=tuple(failures))
    print(f"{_trials(outcome.done)} done, {len(failures)} failed.")
    _print_ending(cells, failures)
    return outcome


def _print_ending(cells: Sequence[Cell], failures: Sequence[Failure]) -> None:
    """Print verdicts by cell, caveats, the folder and the next command; last, the failures once more.

    Args:
        cells: The trials.
        failures: Those that failed.
    """
    for line in ending.lines(cells):
        print(line)
    if len(cells) > 1:
        for line in summarised([f"{failure.trial}: {failure.summary}" for failure in failures], "failed"):
            print(in_one_line(line), file=sys.stderr)


def _trials(number: int) -> str:
    return f"{number} trial" + ("" if number == 1 else "s")


def _distinct(configs: Sequence[HarnessConfig]) -> list[Cell]:
    """One cell per identity and store, in order; ConfigError when a store cannot be written."""
    stores = {root: Store(root) for root in dict.fromkeys(config.results for config in configs)}
    for store in stores.values():
        store.check_writable()
    cells: dict[Path, Cell] = {}
    fingerprint = functools.cache(targets.data_fingerprint)  # a task is asked once
    for config in configs:
        found = resolved(config, fingerprint)
        try:
            cell = Cell(found, stores[config.results], identity(found.trial))
            cells.setdefault(cell.folder, cell)
        except ValueError as error:
            raise ConfigError(
                "name" if config.name else "experiment", config.experiment, f"the name of a folder, of at most {MOST_BYTES} bytes"
            ) from error
    return list(cells.values())


def resolved(config: HarnessConfig, fingerprint: Callable[[str, str, str], str] = targets.data_fingerprint) -> HarnessConfig:
    """Put `device=cuda` in place of `auto` where there is a CUDA device; `auto` that stays means the CPU.

    So a trial on a GPU and one on a CPU have different identities. Files of the user are named from this folder, and the
    results by their whole path: the code of a task may go into another folder.

    Args:
        config: The settings of a trial.
        fingerprint: `targets.data_fingerprint`, or a function that remembers what that gave.

    Returns:
        The settings, as `identity` wants them.
    """
    workload, optimizer = config.workload, config.optimizer
    if (target := workload.target) is not None:
        source = workload.source or fingerprint("workload.target", target, json.dumps(workload.args)) or None
        workload = dataclasses.replace(workload, target=targets.place("workload.target", target), source=source)
    if (target := optimizer.target) is not None:
        optimizer = dataclasses.replace(optimizer, target=targets.place("optimizer.target", target))
    device, results = Device.cuda if _uses_cuda(config.device) else config.device, os.path.abspath(config.results)
    return dataclasses.replace(config, device=device, results=results, workload=workload, optimizer=optimizer)


def _longest_first(cells: Sequence[Cell]) -> list[Cell]:
    """Order trials experiment by experiment, each with its longest first, as far as can be guessed.

    At the end of an experiment no core then waits for one.

    Args:
        cells: The trials.

    Returns:
        The same trials.
    """
    place = {experiment: i for i, experiment in enumerate(dict.fromkeys(cell.config.experiment for cell in cells))}
    return sorted(cells, key=lambda cell: (place[cell.config.experiment], -_size(cell.config)))


def _size(config: TrialConfig) -> float:
    """In samples, as it were: about proportional to the time of a trial among those of its kind."""
    is_slow = config.precision in (Precision.float16, Precision.bfloat16)  # on a CPU, nearly twice float32's time
    return config.steps * config.effective_batch * (2 if is_slow else 1)


def _kind(config: TrialConfig) -> Kind:
    return (config.experiment, config.study, config.workload.data, config.workload.model)


@dataclass(kw_only=True)
class _Pool:
    """The trials under way, and the counts of those that have ended."""

    run: TrialFunction
    places: list[str | None]  # of the trials that may run at once (`_places`); those that are free
    threads: int
    progress: Progress
    todo: deque[Cell]
    children: list[Child] = field(default_factory=list)
    taken: deque[tuple[float, Cell]] = field(default_factory=deque)  # run by another process; when to look again
    time: TimeLeft = field(default_factory=TimeLeft)
    done: int = 0
    skipped: int  # finished before we could start them
    failures: list[Failure] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        return bool(self.todo or self.children or self.taken)

    def start_children(self) -> None:
        while self.taken and self.taken[0][0] <= time.monotonic():
            self.todo.append(self.taken.popleft()[1])
        while self.todo and self.places:
            cell = self.todo.popleft()
            if cell.is_finished():  # by another process, since the first look
                self.skipped += 1
            else:
                self._start(cell)
        self._show()

    def _start(self, cell: Cell) -> None:
        for _ in range(MOST_STARTS):
            try:
                self.children.append(Child.start(cell, self.run, self.threads, self.places[0]))
                del self.places[0]
                return
            except EOFError:
                told = "its process could not be started: what it imports ends it, as `python -c 'import torch'` should show"
            except OSError as error:
                told = f"its process could not be started ({error})"
        self._fail(Failure(trial=cell.trial, summary=told, details=""), cell)

    def wait(self, wakeup: int) -> None:
        """Until a child ends, a signal comes, or a second has passed."""
        wait([wakeup, *(child.process.sentinel for child in self.children)], timeout=1.0)
        for child in [child for child in self.children if not child.process.is_alive()]:
            self.children.remove(child)
            self.places.append(child.gpu)
            self._account(child)
        for said in filter(None, map(Child.look, self.children)):
            self.progress.note(said)
        self._show()

    def stop(self) -> None:
        """End what still runs: SIGTERM, and SIGKILL for what does not go."""
        for child in self.children:
            child.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for child in self.children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.exitcode is None:
                child.process.kill()
                child.process.join(1.0)  # a forkserver that is stopped does not tell
            child.close()
        self.children.clear()

    def _account(self, child: Child) -> None:
        match child.end():
            case Done() if (unsafe := _unfinished(child.cell)) is not None:
                self._fail(unsafe, child.cell)
            case Done(warnings=told):
                self.done += 1
                config = child.cell.config
                self.time.ended(_kind(config), _size(config), time.monotonic() - child.started)
                for warning in told:
                    self.progress.note(f"{child.cell.trial}: {warning}")
            case RunsElsewhere(state=State.finished):
                self.skipped += 1
            case RunsElsewhere():
                self.taken.append((time.monotonic() + RETRY_SECONDS, child.cell))
            case Failure() as failure if child.cell.is_finished():  # the end of the mirror, after the results were safe
                self.done += 1
                self.progress.note(f"{failure.trial}: finished, but then: {failure.summary}")
            case Failure() as failure:
                self._fail(failure, child.cell)

    def _fail(self, failure: Failure, cell: Cell) -> None:
        self.failures.append(failure)
        self.progress.note(_tell(failure, _mark_failed(cell, failure)))

    def _show(self) -> None:
        self.progress.show(
            done=self.done + self.skipped,
            running=len(self.children),
            failed=len(self.failures),
            elsewhere=len(self.taken),
            left=self._left,
        )

    def _left(self) -> str:
        waiting = [(cell.config, 0.0) for cell in (*self.todo, *(cell for _, cell in self.taken))]
        now = time.monotonic()
        running = [(child.cell.config, now - child.started) for child in self.children]
        at_once = max(1, len(self.places) + len(self.children))
        return self.time.estimate(((_kind(config), _size(config), run) for config, run in (*waiting, *running)), at_once)


def _unfinished(cell: Cell) -> Failure | None:
    """Why a trial that has reported its end is not done: done is what can be read back."""
    found = cell.store.standing(cell.config.experiment, cell.trial)
    if found.state == State.finished:
        return None
    told = f"its results are {found.state} ({found.detail or 'there are none'}); the same command runs it again"
    return Failure(trial=cell.trial, summary=told, details="")


def _mark_failed(cell: Cell, failure: Failure) -> Path | None:
    """`failed.json` of a failure, or None when it could not be written: a full disk must not stop the others."""
    with contextlib.suppress(OSError):
        if cell.store.mark_failed(cell.config.experiment, cell.trial, f"{failure.details}\n{failure.summary}"):
            return cell.folder / "failed.json"
    return None


def _tell(failure: Failure, record: Path | None) -> str:
    tail = [] if failure.is_bad_input else [f"    {line[:LINE_LENGTH]}" for line in failure.details.strip().splitlines()[-6:]]
    where = [f"    all of it: {record}"] if record and not failure.is_bad_input else []
    return "\n".join([f"failed: {failure.trial}: {failure.summary}", *tail, *where])


# Surroundings ------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Signals:
    readable: int  # becomes ready when a signal has come
    signals: list[int] = field(default_factory=list)


@contextlib.contextmanager
def _caught_signals() -> Iterator[_Signals]:
    """Collect SIGINT, SIGTERM and SIGHUP, instead of an exception at any point: no child is started and then forgotten.

    Further signals are ignored during shutdown, which ends after STOP_SECONDS even if what it waits for never comes. Outside
    the main thread, where Python has no signal handlers, nothing is caught.

    Yields:
        The signals that came, and a file descriptor that becomes readable with each.
    """
    readable, writable = os.pipe()
    caught, is_command = _Signals(readable=readable), processes.is_command()

    def handler(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGALRM:
            os.write(2, b"Stopped; the same command resumes.\n")
            processes.leave(128 + caught.signals[0])
        if is_command and not caught.signals:
            signal.alarm(STOP_SECONDS)
        caught.signals.append(number)
        os.write(writable, b"x")

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in processes.OF_A_TERMINAL if signal.getsignal(number) != signal.SIG_IGN]  # as under nohup
        previous = {number: signal.signal(number, handler) for number in (*heard, signal.SIGALRM)}
    try:
        yield caught
    finally:
        for number, old in previous.items():
            if not (is_command and caught.signals):
                signal.signal(number, old)
            elif number != signal.SIGALRM:
                signal.signal(number, signal.SIG_IGN)
        os.close(readable)
        os.close(writable)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_threads(cells: Sequence[Cell], workers: int) -> int:
    """Of each trial: one where several run at once, and for small models, which are slower on several.

    All trials of a sweep decide, not those left: a resumed trial computes with as many threads as it would have had.

    Returns:
        All cores for large models that run alone, else 1.
    """
    is_large = any(cell.config.workload.model == Model.resnet18 for cell in cells)
    return _num_cores() if is_large and min(workers, len(cells)) == 1 else 1


def _places(config: HarnessConfig) -> list[str | None]:
    """Where a trial may run at the same time as the others: for each, what CUDA_VISIBLE_DEVICES is there; None where it stays.

    On GPUs `workers` trials on each of them, one unless configured, that see no other GPU; else one per core.

    Returns:
        An entry for each trial that may run at once: its CUDA_VISIBLE_DEVICES, or None where the variable stays as it is.
    """
    if not _uses_cuda(config.device):
        return [None] * (config.workers or _num_cores())
    from accumulation_harness.system import accelerator

    devices = accelerator.visible_devices()
    return [device if len(devices) > 1 else None for _ in range(config.workers or 1) for device in devices or [""]]


def _uses_cuda(device: Device) -> bool:
    return device == Device.cuda or (device == Device.auto and _has_cuda())


@functools.cache
def _has_cuda() -> bool:
    if not driver.is_there():
        return False  # no driver: not worth a second for importing torch
    from accumulation_harness.system import accelerator

    return accelerator.is_available()
