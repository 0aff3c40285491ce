"""Results on disk: one folder per trial, numbers exact, files whole or absent, many writers at once.

```
<root>/<experiment>/<trial>/
    steps.parquet   one row per step and arm
    trial.json      configuration, verdicts, environment, the files that the trial has read, evidence
    failed.json     error and traceback, when the trial raised or its process died
    wandb/          the W&B mirror of the trial (tracking.py)
<root>/.locks/<experiment>/<trial>   held by the process that runs the trial; the kernel frees it when that process dies
```

Numbers are kept bit for bit, NaN and the infinities included. `trial.json` carries its own checksum (record.py) and that of
`steps.parquet`: a damaged file is told from a good one.

A trial is finished where its `trial.json` is good and the files that it has read are what they were. One that was killed starts
over. One that is damaged, or whose files have changed, is never deleted: its folder is renamed to `<trial>.damaged-<n>` or
`<trial>.stale-<n>`; of a damaged one a `StoreWarning` names the reason.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from accumulation_harness.config import ConfigError
from accumulation_harness.results.record import (
    StoredTrial,
    StoreError,
    in_one_line,
    read_steps,
    read_trial,
    write_failed,
    write_record,
)
from accumulation_harness.system import opened
from accumulation_harness.system.enums import StrEnum
from accumulation_harness.system.files import PARTIAL, make_folders, read_file, write_atomically

if TYPE_CHECKING:
    import pandas as pd
    from filelock import BaseFileLock

__all__ = ["State", "Status", "Store", "StoreError", "StoreWarning", "StoredTrial", "TrialTaken", "TrialWriter"]

Scalar = str | int | float | bool | None
Row = Mapping[str, Scalar]

LOCKS = ".locks"
MOST_BYTES = 200  # of a name: file systems take 255, and a sweep's notes and what is kept aside have longer ones
_ASIDE = (".damaged-", ".stale-")  # in the name of a folder that is kept beside the trial's
_LOOK_SECONDS = 0.1  # that somebody may hold a lock who only looks whether it is free
ATTEMPT = ("steps.parquet", "failed.json", "wandb")  # what an attempt that did not finish may leave, beside partial files


class StoreWarning(UserWarning):
    """Something in the results folder is damaged; it was skipped or renamed, never deleted."""


class TrialTaken(RuntimeError):
    """The trial needs no run by this process: another process is running it, or it is finished (see `state`)."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(f"{folder} is {state}")
        self.state = state


class State(StrEnum):
    """The state of a trial, as its folder shows it."""

    finished = "finished"
    running = "running"
    failed = "failed"
    unfinished = "unfinished"  # killed, interrupted, or about to start
    damaged = "damaged"  # has a trial.json or steps that cannot be trusted; the next run renames the folder
    stale = "stale"  # whole, but code or data that it has read are not what they were; the next run renames the folder


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of one trial.

    `detail` is one line: the error of a failed trial, the damage, or what makes the trial stale. A finished trial with a
    damaged `steps.parquet` is damaged, and `stored` is there all the same.
    """

    experiment: str
    trial: str
    state: State
    folder: Path
    detail: str = ""
    stored: StoredTrial | None = field(default=None, repr=False)  # where `trial.json` is good


class Store:
    """The results under a folder. Any number of processes on one file system may use the same folder."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def folder(self, experiment: str, trial: str) -> Path:
        """Return the folder of a trial.

        Args:
            experiment: Name of the experiment.
            trial: Name of the trial.

        Returns:
            The path; it need not exist.

        Raises:
            ValueError: A name is not that of one plain folder.
        """
        for name in (experiment, trial):
            if not _is_name(name) or "/" in name or "\0" in name:
                raise ValueError(f"expected the name of a folder, got {name!r}")
        return self.root / experiment / trial

    def check_writable(self) -> None:
        """Raise ConfigError unless files can be made under the root."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root) as file:
                file.write(b"x")
        except OSError as error:
            raise self._not_writable(error) from error

    def open_trial(self, experiment: str, trial: str, config: Mapping[str, Any]) -> TrialWriter:
        """Claim a trial and start it from nothing; partial results of an earlier attempt are removed.

        Args:
            experiment: The sweep's name.
            trial: The trial's identity.
            config: Its settings as plain JSON types.

        Returns:
            A writer that holds the trial's lock until it is closed.

        Raises:
            TrialTaken: Another process runs the trial, or it is finished.
            ConfigError: The root cannot be written.
        """
        folder = self.folder(experiment, trial)
        try:
            lock = self._locked(folder)
            if lock is None:
                raise TrialTaken(folder, State.running)
            try:
                self._clear(folder)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise self._not_writable(error) from error
        return TrialWriter(folder, dict(config), lock)

    def finished(self, experiment: str, trial: str) -> bool:
        """Decide whether a trial need not be run again.

        Args:
            experiment: Name of the experiment.
            trial: Name of the trial.

        Returns:
            True if it has a good `trial.json`, the `steps.parquet` that belongs to it, and has read what is there now.
        """
        return self.standing(experiment, trial).state == State.finished

    def standing(self, experiment: str, trial: str) -> Status:
        """Say where a trial stands that is to be run from this folder, but for whether it is running.

        Args:
            experiment: Name of the experiment.
            trial: Name of the trial.

        Returns:
            Its state and details.
        """
        return self._status(self.folder(experiment, trial), looks=False)

    def trials(self, experiment: str | None = None) -> Iterator[StoredTrial]:
        """Read finished trials from `trial.json` alone; damaged ones are skipped with a warning.

        Args:
            experiment: Name of the experiment; None: all.

        Yields:
            The trials in the order of their names.
        """
        for folder in self._folders(experiment):
            try:
                yield read_trial(folder)
            except FileNotFoundError:
                continue
            except StoreError as error:
                warnings.warn(f"skipped: {error}", StoreWarning, stacklevel=2)

    def status(self, experiment: str | None = None) -> Iterator[Status]:
        """List every trial that was begun, finished or not.

        Args:
            experiment: Name of the experiment; None: all.

        Yields:
            Where each stands.
        """
        for folder in self._folders(experiment):
            status = self._status(folder)
            if status.state != State.unfinished or self._lock_of(folder).exists():  # else it is no trial's
                yield status

    def steps(self, trial: StoredTrial) -> pd.DataFrame:
        """Read the step rows of a finished trial.

        Args:
            trial: The trial.

        Returns:
            A row per arm and step, in the order they were written.

        Raises:
            StoreError: The file is not the one written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table: pd.DataFrame = pq.read_table(pa.BufferReader(read_steps(trial))).to_pandas()
        except ValueError as error:  # of pyarrow too
            raise StoreError(f"{trial.folder}/steps.parquet: {error}") from error
        return table

    def mark_failed(self, experiment: str, trial: str, error: str) -> bool:
        """Write `failed.json` for a trial whose process died.

        Args:
            experiment: The sweep's name.
            trial: The trial's identity.
            error: The last line of the error, or the whole traceback.

        Returns:
            False, and nothing is written, when the trial is finished or another process has taken it up.
        """
        folder = self.folder(experiment, trial)
        if (lock := self._locked(folder)) is None:
            return False
        try:
            if is_open := not self.finished(experiment, trial):
                write_failed(folder, error)
            return is_open
        finally:
            lock.release()

    def is_running(self, folder: Path) -> bool:
        """Decide whether a process holds the trial's lock.

        Args:
            folder: The trial's folder.

        Returns:
            True if one does.
        """
        try:
            descriptor = os.open(self._lock_of(folder), os.O_RDONLY | os.O_NONBLOCK)  # also of a store of somebody else
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except OSError:
            return True
        finally:
            os.close(descriptor)

    def _lock_of(self, folder: Path) -> Path:
        return self.root / LOCKS / folder.parent.name / folder.name

    def _locked(self, folder: Path) -> BaseFileLock | None:
        """The lock of the trial, whose folder is there from now on; None where another process holds it."""
        from filelock import FileLock, Timeout

        path = self._lock_of(folder)
        for names in ((LOCKS, folder.parent.name), (folder.parent.name, folder.name)):
            make_folders(self.root, *names)
        lock = FileLock(path, timeout=_LOOK_SECONDS, is_singleton=False)
        try:
            lock.acquire()
            return lock
        except Timeout:
            return None

    def _clear(self, folder: Path) -> None:
        """Make the folder that of a trial that begins; the caller holds the lock."""
        status = self._status(folder, looks=False)
        if status.state == State.finished:
            raise TrialTaken(folder, State.finished)
        if status.state in (State.damaged, State.stale):
            name = f"{folder.name}.{status.state}-"
            number = next(n for n in range(1, 10**6) if not folder.with_name(f"{name}{n}").exists())
            folder.rename(target := folder.with_name(f"{name}{number}"))
            folder.mkdir()
            if status.state == State.damaged:
                warnings.warn(f"{folder} renamed to {target.name}: {status.detail}", StoreWarning, stacklevel=4)
        for path in (*(folder / name for name in ATTEMPT), *folder.glob(f"*{PARTIAL}")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        folder.touch()  # so old is the trial

    def _folders(self, experiment: str | None) -> Iterator[Path]:
        """The folders that may be trials, in the order of their names."""
        for parent in _subfolders(self.root):
            if experiment in (None, parent.name):
                yield from _subfolders(parent)

    def _status(self, folder: Path, *, looks: bool = True) -> Status:
        """Where a trial stands; whether it is running is asked where one `looks` at it."""

        def status(state: State, detail: str = "", stored: StoredTrial | None = None) -> Status:
            names = {"experiment": folder.parent.name, "trial": folder.name}
            return Status(**names, state=state, folder=folder, detail=in_one_line(detail), stored=stored)

        trial = None
        try:
            trial = read_trial(folder)
            read_steps(trial)
            reason = self._stale(trial, looks)
            return status(State.stale if reason else State.finished, reason, trial)
        except FileNotFoundError:
            pass
        except StoreError as error:
            return status(State.damaged, str(error), trial)
        if looks and self.is_running(folder):
            return status(State.running)
        try:
            return status(State.failed, str(json.loads(read_file(folder / "failed.json"))["error"]))
        except FileNotFoundError:
            return status(State.unfinished)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return status(State.failed, f"failed.json cannot be read: {error}")

    def _stale(self, trial: StoredTrial, looks: bool) -> str:
        """Which of the files that it has read is another now; who only looks at a trial of another machine cannot say."""
        here = os.getcwd()
        folder = str(trial.record.get("folder", here))
        if looks and not os.access(folder, os.X_OK):
            return ""
        return opened.changed(trial.record.get("files", {}), folder if looks else here, self.root)

    def _not_writable(self, error: OSError) -> ConfigError:
        where = error.filename or self.root
        return ConfigError("results", self.root, f"a folder that can be written ({error.strerror}: {where})")


class TrialWriter:
    """The running trial: `add` at every step, then `finish`. As a context manager it records what was raised inside it.

    An exception leaves `failed.json`; Ctrl-C and leaving without `finish` leave the trial unfinished, to be started over.
    """

    def __init__(self, folder: Path, config: dict[str, Any], lock: BaseFileLock) -> None:
        self.folder = folder
        self._config = config
        self._lock = lock
        self._rows: list[Row] = []

    def add(self, *rows: Row) -> None:
        """Append rows, which are on disk once the trial is finished.

        Args:
            rows: Column -> plain scalar.
        """
        self._rows += rows

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Make the trial finished. All or nothing: `trial.json` appears last, and only when everything before it is on disk.

        Args:
            summary: `arms` (one row per arm, see `judged_arm`), `environment`, `seconds` and whatever else is to be kept;
                plain JSON types only.

        Raises:
            StoreError: The disk is full, or the folder is gone or cannot be written.
        """
        steps = _to_parquet(self._rows)
        checked = {"steps": len(self._rows), "steps_sha256": hashlib.sha256(steps).hexdigest()}
        names = {"experiment": self.folder.parent.name, "trial": self.folder.name}
        try:
            write_atomically(self.folder / "steps.parquet", steps)
            write_record(self.folder, {**names, "config": self._config, **summary, **checked})
            Path(self._lock.lock_file).unlink(missing_ok=True)  # who has it open finds the trial finished
        except OSError as error:
            if self._is_stored():
                raise StoreError(f"{self.folder} is finished; afterwards: {error.strerror}") from error
            full = "the disk is full. Finished trials are safe; free some space and run again: this trial starts over"
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise StoreError(f"{self.folder}: {full if is_full else f'cannot be written ({error.strerror})'}") from error
        self.close()

    def _is_stored(self) -> bool:
        return (self.folder / "trial.json").exists()

    def close(self) -> None:
        """Give the trial up, unfinished; nothing happens after `finish`."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._lock.is_locked and error is not None and not isinstance(error, KeyboardInterrupt) and not self._is_stored():
            try:
                write_failed(self.folder, "".join(traceback.format_exception(kind, error, trace)))
            except OSError as second:  # a full disk, most likely: the error itself goes on to the caller
                warnings.warn(f"{self.folder}: failed.json could not be written ({second})", StoreWarning, stacklevel=2)
        self.close()


def _to_parquet(rows: Sequence[Row]) -> bytes:
    """One table, columns in the order of their first appearance; a column that a row does not have is a gap there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = dict.fromkeys(name for row in rows for name in row)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: pa.array([row.get(name) for row in rows]) for name in names}), sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _is_name(name: str) -> bool:
    """Whether an experiment or a trial may have this name: not hidden, not that of a damaged one, in UTF-8, and not too long."""
    is_text = name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)
    return (
        is_text
        and 0 < len(name.encode()) <= MOST_BYTES
        and not name.startswith(".")
        and not any(aside in name for aside in _ASIDE)
    )


def _subfolders(folder: Path) -> list[Path]:
    """The folders in it that may be ours, by name; none when it is not there, or, with a warning, not for us to read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if _is_name(entry.name) and entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        warnings.warn(f"{folder}: cannot be read ({error.strerror})", StoreWarning, stacklevel=2)
        return []
