"""Results on disk: one folder per trial, numbers exact, files whole or absent, many writers at once.

```
<root>/<experiment>/<trial>/
    config.json     the whole resolved configuration
    steps.jsonl     one row per step and arm while the trial runs; a row counts once its newline is on disk
    steps.parquet   the same rows, at the end
    trial.json      configuration, verdicts, evidence, environment; its presence means "finished"
    failed.json     error and traceback, when the trial raised or its process died
    lock            flock of the process that runs the trial; the kernel frees it when that process dies
    wandb/          the W&B mirror of the trial (tracking.py)
```

Numbers are exact, NaN and the infinities included: rows.py says how.

`trial.json` carries its own checksum (record.py) and that of `steps.parquet`: a damaged file is told from a good one.

A trial that was killed starts over: its partial files are replaced. What is damaged or not ours is never deleted or overwritten:
the folder is renamed to `<trial>.set-aside-<n>` and a `StoreWarning` names the reason.

Nothing is read or written through a link inside the root, and only regular files are opened; `Store.foreign` names the others.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from accumulation_harness.config import ConfigError
from accumulation_harness.enums import StrEnum
from accumulation_harness.results import locks, measurements, sweeps
from accumulation_harness.results.record import (
    FILE_MODE,
    FOLDER_MODE,
    FORMAT,
    PARTIAL,
    StoredTrial,
    StoreError,
    damage,
    in_one_line,
    read_file,
    read_steps,
    read_trial,
    write_atomically,
    write_failed,
    write_record,
)
from accumulation_harness.results.rows import Row, RowFile, from_parquet, read_rows, to_parquet

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["State", "Status", "Store", "StoreError", "StoreWarning", "StoredTrial", "TrialTaken", "TrialWriter", "read_rows"]

_ATTEMPT = ("steps.jsonl", "steps.parquet", "failed.json")  # what an attempt that did not finish may leave
_FILES = ("config.json", "trial.json", *_ATTEMPT)
_MIRROR = "wandb"
_MOST_CLAIMS = 20  # of one trial whose folder is deleted again and again
_MARKS = ("trial.json", "lock", "failed.json", "config.json")  # one of them is in every folder of a trial
_ROOT_LOCK = ".lock"
_RESERVED = ("sha256", "format", "experiment", "trial", "config", "steps", "steps_sha256")
_PARTIAL = re.compile(rf"(\.\d+)?{re.escape(PARTIAL)}$")
_SET_ASIDE = re.compile(r"\.set-aside-\d+$")
_SURROGATE = re.compile("[\ud800-\udfff]")  # stands for a byte of a name that is not in UTF-8


class StoreWarning(UserWarning):
    """Something in the results folder is damaged or not ours; it was skipped or set aside, never deleted."""


class TrialTaken(RuntimeError):
    """The trial needs no run by us: another process runs it now, or it is finished (see `state`)."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(f"{folder} is {state}")
        self.state = state


class State(StrEnum):
    """Where a trial stands, as its folder tells."""

    finished = "finished"
    running = "running"
    failed = "failed"
    unfinished = "unfinished"  # killed, interrupted, or about to start
    damaged = "damaged"  # has a trial.json that cannot be trusted; the next run sets it aside


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where one trial stands; `detail` is the error of a failed trial or the damage of a damaged one, on one line.

    A finished trial whose `steps.parquet` is not the one written is damaged, and `stored` is there all the same.
    """

    experiment: str
    trial: str
    state: State
    folder: Path
    detail: str = ""
    stored: StoredTrial | None = field(default=None, repr=False)  # where `trial.json` is good


class Store:
    """The results under `root`. Any number of processes on one file system may use the same root."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def folder(self, experiment: str, trial: str) -> Path:
        """Where a trial lives; ValueError for a name that is not one plain folder name."""
        for name in (experiment, trial):
            if not _is_name(name) or "/" in name or "\0" in name:
                raise ValueError(f"expected the name of a folder, got {name!r}")
        return self.root / experiment / trial

    def check_writable(self) -> None:
        """Raise ConfigError unless files can be made under the root."""
        try:
            _make_root(self.root)
            with tempfile.TemporaryFile(dir=self.root) as file:
                file.write(b"x")
        except OSError as error:
            raise ConfigError("results", self.root, f"a folder that can be written ({error.strerror})") from error

    def open_trial(self, experiment: str, trial: str, config: Mapping[str, Any]) -> TrialWriter:
        """Claim a trial and start it from nothing; partial results of an earlier attempt are replaced.

        Raises TrialTaken when another process runs the trial or it is finished, ConfigError when the root cannot be written.
        """
        folder = self.folder(experiment, trial)
        try:
            lock = self._claimed(folder)
        except OSError as error:
            raise ConfigError(
                "results", self.root, f"a folder that can be written ({error.strerror}: {error.filename})"
            ) from error
        return TrialWriter(folder, dict(config), lock)

    def finished(self, experiment: str, trial: str) -> bool:
        """Whether the trial has a good `trial.json` and the `steps.parquet` that belongs to it."""
        folder = self.folder(experiment, trial)
        return (folder / "trial.json").exists() and _link_to(folder) is None and damage(folder) is None

    def trials(self, experiment: str | None = None) -> Iterator[StoredTrial]:
        """Finished trials in the order of their names, from `trial.json` alone; damaged ones are skipped with a warning."""
        for folder in self._folders(experiment):
            try:
                yield read_trial(folder)
            except FileNotFoundError:
                continue
            except StoreError as error:
                warnings.warn(f"skipped: {error}", StoreWarning, stacklevel=2)

    def status(self, experiment: str | None = None) -> Iterator[Status]:
        """Every trial that has a folder, finished or not."""
        for folder in self._folders(experiment):
            if _is_trial(folder):
                yield self._status(folder)

    def foreign(self) -> Iterator[str]:
        """One line for each link, file or folder that no trial is made of, and for what cannot be read; all are left alone."""
        if self.root.exists() and not os.access(self.root, os.R_OK | os.X_OK):
            yield f"{self.root} cannot be read"
        for experiment in _entries(self.root):
            if odd := _odd(experiment, files=(_ROOT_LOCK,), folders=(sweeps.FOLDER, measurements.FOLDER)):
                yield odd
            elif experiment.is_dir(follow_symlinks=False) and experiment.name not in (sweeps.FOLDER, measurements.FOLDER):
                yield from _foreign_trials(experiment)

    def steps(self, trial: StoredTrial) -> pd.DataFrame:
        """The step rows of a finished trial, in the order they were written; StoreError when the file is not the one written."""
        try:
            return from_parquet(read_steps(trial))
        except ValueError as error:  # of pyarrow too
            raise StoreError(f"{trial.folder}/steps.parquet: {error}") from error

    def mark_failed(self, experiment: str, trial: str, error: str) -> bool:
        """Write `failed.json` for a trial whose process died; `error` is its last line or whole traceback.

        False, and nothing written, when the trial is finished or another process has taken it up.
        """
        folder = self.folder(experiment, trial)
        if _link_to(folder) is not None:
            return False
        _make_root(self.root)
        with self._root_lock():
            _make_folder(folder.parent)
            _make_folder(folder)
            lock = locks.take(folder / "lock")
            if lock is None:
                return False
            try:
                if self.finished(experiment, trial):
                    return False
                write_failed(folder, error)
                return True
            finally:
                locks.release(folder / "lock", lock)

    @contextmanager
    def _root_lock(self) -> Iterator[None]:
        """Held for moments, while trials are claimed or set aside, so that nobody renames a folder another has just claimed."""
        descriptor = os.open(self.root / _ROOT_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _claimed(self, folder: Path) -> int:
        """As `_claim`, again where somebody deletes folders meanwhile."""
        for left in reversed(range(_MOST_CLAIMS)):
            try:
                _make_root(self.root)
                with self._root_lock():
                    return self._claim(folder)
            except (FileNotFoundError, FileExistsError):  # the latter from a folder that was there, and is not any more
                if not left:
                    raise
        raise AssertionError

    def _claim(self, folder: Path) -> int:
        """Lock descriptor of a folder that holds nothing but its lock."""
        if (link := _link_to(folder)) is not None:
            raise ConfigError("results", self.root, f"a store without links: {link} leads to {os.readlink(link)}")
        _make_folder(folder.parent)
        _make_folder(folder)
        if _is_no_file(folder / "lock"):
            _set_aside(folder, f"{folder / 'lock'} is not a file of this store")
            folder.mkdir(FOLDER_MODE)
        lock = locks.take(folder / "lock")
        if lock is None:
            raise TrialTaken(folder, State.running)
        if self.finished(folder.parent.name, folder.name):
            locks.release(folder / "lock", lock)
            raise TrialTaken(folder, State.finished)
        problem = damage(folder) or _foreign(folder)
        if problem is None:
            _clear(folder)
            return lock
        os.close(lock)  # nobody can take it up: that needs the root lock
        _set_aside(folder, problem)
        return self._claim(folder)

    def _folders(self, experiment: str | None) -> Iterator[Path]:
        """The folders that may be trials, in the order of their names."""
        for parent in _subfolders(self.root):
            if experiment in (None, parent.name):
                yield from _subfolders(parent)

    def _status(self, folder: Path) -> Status:
        def status(state: State, detail: str = "", stored: StoredTrial | None = None) -> Status:
            names = {"experiment": folder.parent.name, "trial": folder.name}
            return Status(**names, state=state, folder=folder, detail=detail, stored=stored)

        trial = None
        try:
            trial = read_trial(folder)
            read_steps(trial)
            return status(State.finished, stored=trial)
        except FileNotFoundError:
            pass
        except StoreError as error:
            return status(State.damaged, in_one_line(str(error)), trial)
        if self.is_running(folder):
            return status(State.running)
        try:
            return status(State.failed, in_one_line(str(json.loads(read_file(folder / "failed.json"))["error"])))
        except FileNotFoundError:
            return status(State.unfinished)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return status(State.failed, in_one_line(f"failed.json cannot be read: {error}"))

    def is_running(self, folder: Path) -> bool:
        """Whether a process holds the trial's lock."""
        if not (folder / "lock").exists() or _is_no_file(folder / "lock") or _is_no_file(self.root / _ROOT_LOCK):
            return False
        # Under the root's lock: else a trial claimed at this moment would take our probe for a running process.
        with suppress(FileNotFoundError), self._root_lock():
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
        return False  # deleted meanwhile


class TrialWriter:
    """The running trial: `add` at every step, then `finish`. As a context manager it records what was raised inside it.

    An exception leaves `failed.json`; Ctrl-C and leaving without `finish` leave the trial unfinished, to be started over.
    """

    def __init__(self, folder: Path, config: dict[str, Any], lock: int) -> None:
        self.folder = folder
        self._config = config
        self._lock: int | None = lock
        try:
            write_atomically(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())
            self._rows = RowFile(folder / "steps.jsonl")
        except OSError as error:
            self._release()
            raise _explained(error, folder) from error

    def add(self, *rows: Row) -> None:
        """Append rows of plain scalars; once this returns, the death of the process does not lose them.

        RowError when a value is no scalar or a column changes its type, StoreError when it cannot be written.
        """
        try:
            self._rows.append(*rows)
        except OSError as error:
            raise _explained(error, self.folder / "steps.jsonl") from error

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Make the trial finished: `summary` holds `arms`, `environment`, `seconds` and whatever else is to be kept.

        Plain JSON types only; `arms` has one verdict row per arm: the columns of `verdicts.csv`, and `evidence`.
        All or nothing: `trial.json` appears last, and only when everything before it is on disk.
        """
        missing = {"arms", "environment", "seconds"} - summary.keys()
        reserved = summary.keys() & set(_RESERVED)
        if missing or reserved:
            raise ValueError(f"expected arms, environment, seconds and free names, got missing {missing}, reserved {reserved}")
        try:
            self._rows.close()
            rows = read_rows(self.folder / "steps.jsonl")
            if len(rows) != self._rows.num_rows:
                raise StoreError(f"{self.folder}/steps.jsonl: {self._rows.num_rows} rows were written, {len(rows)} are there")
            steps = to_parquet(rows)
            assert self._lock is not None
            if not locks.is_at(self.folder / "lock", self._lock):
                raise StoreError(f"{self.folder}: was deleted, or put in another's place, while the trial ran")
            write_atomically(self.folder / "steps.parquet", steps)
            record = {
                "format": FORMAT,
                "experiment": self.folder.parent.name,
                "trial": self.folder.name,
                "config": self._config,
                **summary,
                "steps": len(rows),
                "steps_sha256": hashlib.sha256(steps).hexdigest(),
            }
            write_record(self.folder, record)
        except OSError as error:
            raise _explained(error, self.folder) from error
        (self.folder / "steps.jsonl").unlink(missing_ok=True)
        self._release()

    def close(self) -> None:
        """Give the trial up, unfinished; nothing happens after `finish`."""
        self._rows.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            locks.release(self.folder / "lock", self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock is not None and error is not None and not isinstance(error, KeyboardInterrupt):
            try:
                write_failed(self.folder, "".join(traceback.format_exception(kind, error, trace)))
            except OSError as second:  # a full disk, most likely: the error itself goes on to the caller
                warnings.warn(f"{self.folder}: failed.json could not be written ({second})", StoreWarning, stacklevel=2)
        self.close()


def _foreign(folder: Path) -> str | None:
    """Names what is in a trial's folder and is not ours."""
    ours = {"lock", *_FILES}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not (
            entry.is_dir(follow_symlinks=False)
            if entry.name == _MIRROR
            else _PARTIAL.sub("", entry.name) in ours and entry.is_file(follow_symlinks=False)
        ):
            return f"{entry.path} is not a file of this store"
    return None


def _clear(folder: Path) -> None:
    """Remove what an attempt that did not finish has left."""
    for path in (*(folder / name for name in _ATTEMPT), *folder.glob(f"*{PARTIAL}")):
        path.unlink(missing_ok=True)
    if (folder / _MIRROR).exists():
        shutil.rmtree(folder / _MIRROR)


def _is_no_file(path: Path) -> bool:
    """Whether something other than a file is at `path`; asked in one call, because another process may remove it at any time."""
    try:
        return not stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _make_folder(path: Path) -> None:
    """A folder at `path`, in place of anything else that was there; the caller holds the root lock."""
    if os.path.lexists(path) and not path.is_dir():
        _set_aside(path, "is not a folder")
    path.mkdir(FOLDER_MODE, exist_ok=True)


def _make_root(path: Path) -> None:
    """The folder of a store, with those above it."""
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(FOLDER_MODE, exist_ok=True)


def _set_aside(path: Path, reason: str) -> None:
    """Rename to the next free `<name>.set-aside-<n>`; the caller holds the root lock."""
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.set-aside-{number}")):
        number += 1
    path.rename(target)
    warnings.warn(f"{path} set aside as {target.name}: {reason}", StoreWarning, stacklevel=2)


def _explained(error: OSError, path: Path) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"{path}: the disk is full. Finished trials are safe; free some space and run again: this trial starts over"
        )
    return StoreError(f"{path}: cannot be written ({error.strerror})")


def _link_to(folder: Path) -> Path | None:
    """The trial's folder or that of its experiment, where it is a link."""
    return next((path for path in (folder.parent, folder) if path.is_symlink()), None)


def _is_trial(folder: Path) -> bool:
    return any((folder / name).exists() for name in _MARKS)


def _is_name(name: str) -> bool:
    """Whether an experiment or a trial may have this name: not hidden, not set aside, and in UTF-8."""
    return bool(name) and not name.startswith(".") and not _SET_ASIDE.search(name) and not _SURROGATE.search(name)


def _foreign_trials(experiment: os.DirEntry[str]) -> Iterator[str]:
    """What `Store.foreign` says of the folder of an experiment."""
    trials = _entries(experiment)
    folders = {trial.name for trial in trials if trial.is_dir(follow_symlinks=False) and _is_trial(Path(trial.path))}
    if not folders:
        why = "holds no trial" if os.access(experiment, os.R_OK | os.X_OK) else "cannot be read"
        yield in_one_line(f"{experiment.path} {why}")
        return
    for trial in trials:
        inside = _entries(trial) if trial.name in folders else []
        odds = [_odd(entry, files=("lock", *_FILES), folders=(_MIRROR,), others=False) for entry in inside]
        yield from filter(None, odds if trial.name in folders else [_odd(trial, others=False)])


def _odd(entry: os.DirEntry[str], files: Sequence[str] = (), folders: Sequence[str] = (), *, others: bool = True) -> str | None:
    """What is wrong with an entry of a folder that has these files and folders, and other folders or none; None: nothing."""
    name = _PARTIAL.sub("", entry.name)
    if not _is_name(name) and name not in (*files, *folders):
        return in_one_line(f"{entry.path} has a name that is not in UTF-8") if _SURROGATE.search(name) else None
    expected = "a file" if name in files else "a folder" if name in folders else None
    if entry.is_symlink():
        found = "a link"
    elif entry.is_dir(follow_symlinks=False):
        found = "a folder"
    else:
        found = "a file" if entry.is_file(follow_symlinks=False) else "a special file"
    is_fine = found == expected if expected else found == "a folder" and others
    return None if is_fine else in_one_line(f"{entry.path} is {found}" + (f", not {expected}" if expected else ""))


def _entries(folder: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """What is in a folder, by name; nothing when it is not there or not for us to read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _subfolders(folder: Path) -> Iterator[Path]:
    """The folders in it that may be ours, in the order of their names."""
    for entry in _entries(folder):
        if _is_name(entry.name) and entry.is_dir(follow_symlinks=False):
            yield folder / entry.name
