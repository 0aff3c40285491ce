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

Numbers: Python's shortest repr, which reads back to the same double; NaN and the infinities are the tokens `NaN`, `Infinity` and
`-Infinity`, which `json.loads` reads back (the payload of a NaN is not kept). pandas' own JSON reader is not exact.

`trial.json` is plain JSON whose first member is the SHA-256 of every byte after the first line; `steps_sha256` is that of `steps.parquet`.

A trial that was killed starts over: its partial files are replaced. What is damaged or not ours is never deleted or overwritten:
the folder is renamed to `<trial>.set-aside-<n>` and a `StoreWarning` names the reason.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from harness.config import ConfigError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

FORMAT = 1
PARTIAL = ".partial"  # suffix of a file that is being written aside
_TEMPORARY = (
    "steps.jsonl",
    "steps.parquet",
    "failed.json",
    "wandb",
    *(f"{n}.json{PARTIAL}" for n in ("config", "trial", "failed")),
)
_OWN = frozenset({"config.json", "trial.json", "lock", f"steps.parquet{PARTIAL}", *_TEMPORARY})
_RESERVED = ("sha256", "format", "experiment", "trial", "config", "steps", "steps_sha256")
_SET_ASIDE = re.compile(r"\.set-aside-\d+$")
_EXACT_INTEGERS = 2**53  # every integer up to this one is a double

Scalar = str | int | float | bool | None


class StoreError(RuntimeError):
    """A result that cannot be read or written; the message names the file."""


class StoreWarning(UserWarning):
    """Something in the results folder is damaged or not ours; it was skipped or set aside, never deleted."""


class TrialTaken(RuntimeError):
    """The trial needs no run by us: another process runs it now, or it is finished (see `state`)."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(f"{folder} is {state}")
        self.state = state


class State(StrEnum):
    finished = "finished"
    running = "running"
    failed = "failed"
    unfinished = "unfinished"  # killed, interrupted, or about to start
    damaged = "damaged"  # has a trial.json that cannot be trusted; the next run sets it aside


@dataclass(frozen=True, kw_only=True)
class StoredTrial:
    """A finished trial as `trial.json` tells it; `record` is that file, with whatever else the engine put into it."""

    folder: Path
    record: dict[str, Any] = field(repr=False)

    @property
    def experiment(self) -> str:
        return str(self.record["experiment"])

    @property
    def trial(self) -> str:
        return str(self.record["trial"])

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.record["config"]
        return config

    @property
    def arms(self) -> list[dict[str, Any]]:
        """One verdict row per arm: the columns of `verdicts.csv`, and `evidence`."""
        arms: list[dict[str, Any]] = self.record["arms"]
        return arms

    @property
    def environment(self) -> dict[str, Any]:
        environment: dict[str, Any] = self.record["environment"]
        return environment

    @property
    def seconds(self) -> float:
        return float(self.record["seconds"])

    @property
    def num_steps(self) -> int:
        """Number of step rows."""
        return int(self.record["steps"])


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where one trial stands; `detail` is the error of a failed trial or the damage of a damaged one, on one line."""

    experiment: str
    trial: str
    state: State
    folder: Path
    detail: str = ""


class Store:
    """The results under `root`. Any number of processes on one file system may use the same root."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def folder(self, experiment: str, trial: str) -> Path:
        """Where a trial lives; ValueError for a name that is not one plain folder name."""
        for name in (experiment, trial):
            if not name or name.startswith(".") or "/" in name or "\0" in name or _SET_ASIDE.search(name):
                raise ValueError(f"expected the name of a folder, got {name!r}")
        return self.root / experiment / trial

    def check_writable(self) -> None:
        """Raise ConfigError unless files can be made under the root."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
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
            folder.parent.mkdir(parents=True, exist_ok=True)
            with self._root_lock():
                lock = self._claim(folder)
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise ConfigError(
                "results", self.root, f"a folder that can be written ({error.strerror}: {error.filename})"
            ) from error
        return TrialWriter(folder, dict(config), lock)

    def finished(self, experiment: str, trial: str) -> bool:
        """Whether the trial has a good `trial.json` and the `steps.parquet` that belongs to it."""
        folder = self.folder(experiment, trial)
        return (folder / "trial.json").exists() and _damage(folder) is None

    def trials(self, experiment: str | None = None) -> Iterator[StoredTrial]:
        """Finished trials in the order of their names, from `trial.json` alone; damaged ones are skipped with a warning."""
        for folder in self._folders(experiment):
            try:
                yield StoredTrial(folder=folder, record=_read_record(folder))
            except FileNotFoundError:
                continue
            except (OSError, StoreError) as error:
                warnings.warn(f"skipped: {error}", StoreWarning, stacklevel=2)

    def status(self, experiment: str | None = None) -> Iterator[Status]:
        """Every trial that has a folder, finished or not."""
        for folder in self._folders(experiment):
            if folder.is_dir() and any((folder / name).exists() for name in ("trial.json", "lock", "failed.json", "config.json")):
                state, detail = self._state(folder)
                yield Status(experiment=folder.parent.name, trial=folder.name, state=state, folder=folder, detail=detail)

    def steps(self, trial: StoredTrial) -> pd.DataFrame:
        """The step rows of a finished trial, in the order they were written; StoreError when the file is not the one written."""
        import pandas as pd
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = trial.folder / "steps.parquet"
        content = _read(path)
        if hashlib.sha256(content).hexdigest() != trial.record["steps_sha256"]:
            raise StoreError(f"{path}: checksum does not match trial.json")
        table = pq.read_table(pa.BufferReader(content))
        frame: pd.DataFrame = table.to_pandas()
        for name in table.column_names:  # pandas would turn integers with gaps into doubles, which is inexact above 2**53
            if pa.types.is_integer(table.schema.field(name).type) and table.column(name).null_count:
                frame[name] = pd.array(table.column(name).to_pylist(), dtype="Int64")
        return frame

    def mark_failed(self, experiment: str, trial: str, error: str) -> bool:
        """Write `failed.json` for a trial whose process died; `error` is its last line or whole traceback.

        False, and nothing written, when the trial is finished or another process has taken it up.
        """
        folder = self.folder(experiment, trial)
        folder.mkdir(parents=True, exist_ok=True)
        with self._root_lock():
            lock = _try_lock(folder / "lock")
            if lock is None:
                return False
            try:
                if self.finished(experiment, trial):
                    return False
                _write_failed(folder, error)
                return True
            finally:
                _release(folder / "lock", lock)

    @contextmanager
    def _root_lock(self) -> Iterator[None]:
        """Held for moments, while trials are claimed or set aside, so that nobody renames a folder another has just claimed."""
        descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _claim(self, folder: Path) -> int:
        """Lock descriptor of a folder that holds nothing but its lock."""
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            _set_aside(folder, "is not a folder")
        folder.mkdir(exist_ok=True)
        lock = _try_lock(folder / "lock")
        if lock is None:
            raise TrialTaken(folder, State.running)
        try:
            if self.finished(folder.parent.name, folder.name):
                _release(folder / "lock", lock)
                raise TrialTaken(folder, State.finished)
            problem = _damage(folder) or _foreign(folder)
            if problem is None:
                _clear(folder)
                return lock
            _set_aside(folder, problem)
        except OSError:
            os.close(lock)
            raise
        os.close(lock)
        folder.mkdir()
        fresh = _try_lock(folder / "lock")
        assert fresh is not None, "the folder was made under the root lock"
        return fresh

    def _folders(self, experiment: str | None) -> Iterator[Path]:
        experiments = [self.folder(experiment, "any").parent] if experiment is not None else _names(self.root)
        for parent in experiments:
            yield from _names(parent)

    def _state(self, folder: Path) -> tuple[State, str]:
        try:
            _read_record(folder)
            return State.finished, ""
        except FileNotFoundError:
            pass
        except (OSError, StoreError) as error:
            return State.damaged, str(error)
        if self._is_running(folder):
            return State.running, ""
        try:
            return State.failed, str(json.loads((folder / "failed.json").read_bytes())["error"])
        except FileNotFoundError:
            return State.unfinished, ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            return State.failed, f"failed.json cannot be read: {error}"

    def _is_running(self, folder: Path) -> bool:
        if not (folder / "lock").exists():
            return False
        with self._root_lock():  # else a trial claimed at this moment would take our probe for a running process
            try:
                descriptor = os.open(folder / "lock", os.O_RDWR)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)


class TrialWriter:
    """The running trial: `row` for every step, then `finish`. As a context manager it records what was raised inside it.

    An exception leaves `failed.json`; Ctrl-C and leaving without `finish` leave the trial unfinished, to be started over.
    """

    def __init__(self, folder: Path, config: dict[str, Any], lock: int) -> None:
        self.folder = folder
        self._config = config
        self._lock: int | None = lock
        self._kinds: dict[str, str] = {}
        self._num_rows = 0
        try:
            _write_whole(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())
            self._file = open(folder / "steps.jsonl", "xb", buffering=0)  # noqa: SIM115 - closed in `close`
        except OSError as error:
            self._release()
            raise _explained(error, folder) from error

    def row(self, row: Mapping[str, Scalar]) -> None:
        """Append one row of plain scalars; once this returns, the death of the process does not lose it.

        ValueError when a value is no scalar or a column changes between number, text and truth value.
        """
        for name, value in row.items():
            self._check_kind(name, value)
        line = json.dumps(dict(row)).encode() + b"\n"
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.close()  # a row after a torn one would make the damage look like a row of its own
            raise _explained(error, self.folder / "steps.jsonl") from error
        self._num_rows += 1

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Make the trial finished: `summary` holds `arms`, `environment`, `seconds` and whatever else is to be kept, as plain JSON types.

        All or nothing: `trial.json` appears last, and only when everything before it is on disk.
        """
        missing = {"arms", "environment", "seconds"} - summary.keys()
        reserved = summary.keys() & set(_RESERVED)
        if missing or reserved:
            raise ValueError(
                f"expected arms, environment and seconds in the summary; missing {missing or 'none'}, reserved {reserved or 'none'}"
            )
        try:
            self._file.close()
            rows = read_rows(self.folder / "steps.jsonl")
            if len(rows) != self._num_rows:
                raise StoreError(f"{self.folder / 'steps.jsonl'}: {self._num_rows} rows were written, {len(rows)} are there")
            record = {
                "format": FORMAT,
                "experiment": self.folder.parent.name,
                "trial": self.folder.name,
                "config": self._config,
                **summary,
                "steps": len(rows),
                "steps_sha256": _write_parquet(self.folder / "steps.parquet", rows),
            }
            _write_whole(self.folder / "trial.json", _encode_record(record))
        except OSError as error:
            raise _explained(error, self.folder) from error
        (self.folder / "steps.jsonl").unlink()
        self._release()

    def close(self) -> None:
        """Give the trial up, unfinished; nothing happens after `finish`."""
        self._file.close()
        self._release()

    def _check_kind(self, name: str, value: Scalar) -> None:
        if value is None:
            return
        kind = _kind(value)
        if kind is None:
            raise ValueError(
                f"expected a number that fits in 64 bits, text, bool or None in column {name!r}, got {type(value).__name__} {value!r}"
            )
        known = self._kinds.setdefault(name, kind)
        if kind == known:
            return
        if {kind, known} == {"small integer", "double"}:
            self._kinds[name] = "double"
        elif {kind, known} == {"small integer", "large integer"}:
            self._kinds[name] = "large integer"
        else:
            raise ValueError(f"expected one type in column {name!r}, got {kind} after {known}")

    def _release(self) -> None:
        if self._lock is not None:
            _release(self.folder / "lock", self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock is not None and error is not None and not isinstance(error, KeyboardInterrupt):
            try:
                _write_failed(self.folder, "".join(traceback.format_exception(kind, error, trace)))
            except OSError as second:  # a full disk, most likely: the error itself goes on to the caller
                warnings.warn(f"{self.folder}: failed.json could not be written ({second})", StoreWarning, stacklevel=2)
        self.close()


def read_rows(path: Path) -> list[dict[str, Scalar]]:
    """Rows of a `steps.jsonl`, also of one that is being written. A last line without newline is dropped.

    Any other line that is not a JSON object raises StoreError with file and line.
    """
    *lines, _torn = _read(path).split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise StoreError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise StoreError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
        rows.append(row)
    return rows


def _kind(value: object) -> str | None:
    match value:
        case bool():
            return "bool"
        case int() if abs(value) <= _EXACT_INTEGERS:
            return "small integer"
        case int() if -(2**63) <= value < 2**63:
            return "large integer"
        case float():
            return "double"
        case str():
            return "text"
        case _:
            return None


def _column(values: Sequence[Scalar]) -> pa.Array:
    """One type per column, chosen from all values: integers become doubles where doubles are among them."""
    import pyarrow as pa

    kinds = {type(value) for value in values} - {type(None)}
    if float in kinds:
        # from_pandas=False: a NaN is a value, not a gap.
        return pa.array([None if value is None else float(value) for value in values], pa.float64(), from_pandas=False)
    for kind, arrow in ((bool, pa.bool_()), (int, pa.int64()), (str, pa.string())):
        if kind in kinds:
            return pa.array(values, arrow)
    return pa.nulls(len(values), pa.float64())


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Scalar]]) -> str:
    """Write the rows, columns in the order of first appearance, and return the file's SHA-256."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    texts = [name for name in names if pa.types.is_string(table.schema.field(name).type)]
    sink = pa.BufferOutputStream()
    # Dictionaries compare values, and -0.0 == 0.0: only text may be stored through one.
    pq.write_table(table, sink, use_dictionary=texts or False)
    content = sink.getvalue().to_pybytes()
    _write_whole(path, content)
    return hashlib.sha256(content).hexdigest()


def _encode_record(record: Mapping[str, Any]) -> bytes:
    body = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items()) + "}\n"
    return b'{"sha256": "%s",\n%s' % (hashlib.sha256(body.encode()).hexdigest().encode(), body.encode())


def _read_record(folder: Path) -> dict[str, Any]:
    """The content of `trial.json`; FileNotFoundError when there is none, StoreError when it is not what was written."""
    path = folder / "trial.json"
    try:
        content = path.read_bytes()
    except NotADirectoryError as error:
        raise FileNotFoundError(path) from error
    head, _, body = content.partition(b"\n")
    if head != b'{"sha256": "%s",' % hashlib.sha256(body).hexdigest().encode():
        raise StoreError(f"{path}: checksum does not match its content")
    record: dict[str, Any] = json.loads(content)
    if record["format"] != FORMAT:
        raise StoreError(f"{path}: format {record['format']}, this version reads {FORMAT}")
    if (record["experiment"], record["trial"]) != (folder.parent.name, folder.name):
        raise StoreError(f"{path}: belongs to {record['experiment']}/{record['trial']}")
    return record


def _damage(folder: Path) -> str | None:
    """Why a `trial.json` and its `steps.parquet` cannot be trusted; None when they can, or when there is no `trial.json`."""
    try:
        record = _read_record(folder)
    except FileNotFoundError:
        return None
    except (OSError, StoreError) as error:
        return str(error)
    path = folder / "steps.parquet"
    try:
        return (
            None
            if hashlib.sha256(path.read_bytes()).hexdigest() == record["steps_sha256"]
            else f"{path}: checksum does not match trial.json"
        )
    except OSError as error:
        return f"{path}: {error.strerror}"


def _foreign(folder: Path) -> str | None:
    """Names what is in a trial's folder and is not ours."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        expected_folder = entry.name == "wandb"
        if entry.name not in _OWN or entry.is_symlink() or entry.is_dir() != expected_folder:
            return f"{entry.path} is not a file of this store"
    return None


def _clear(folder: Path) -> None:
    """Remove what an attempt that did not finish has left."""
    for name in (*_TEMPORARY, f"steps.parquet{PARTIAL}"):
        if name == "wandb":
            shutil.rmtree(folder / name, ignore_errors=True)
        else:
            (folder / name).unlink(missing_ok=True)


def _set_aside(path: Path, reason: str) -> None:
    """Rename to the next free `<name>.set-aside-<n>`; the caller holds the root lock."""
    number = 1
    while os.path.lexists(target := path.with_name(f"{path.name}.set-aside-{number}")):
        number += 1
    path.rename(target)
    warnings.warn(f"{path} set aside as {target.name}: {reason}", StoreWarning, stacklevel=2)


def _try_lock(path: Path) -> int | None:
    """Descriptor that holds the lock, or None when another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # its last holder removed the file between our open and our flock


def _release(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)


def _write_failed(folder: Path, error: str) -> None:
    record = {
        "format": FORMAT,
        "experiment": folder.parent.name,
        "trial": folder.name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "error": (error.strip().splitlines() or ["unknown"])[-1],
        "traceback": error,
    }
    _write_whole(folder / "failed.json", (json.dumps(record, indent=1) + "\n").encode())


def _write_whole(path: Path, content: bytes) -> None:
    """Write aside, sync, and move into place: readers see the old file or the new one, also after a loss of power."""
    aside = path.with_name(path.name + PARTIAL)
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error


def _explained(error: OSError, path: Path) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"{path}: the disk is full. Finished trials are safe; free some space and run again: this trial starts over"
        )
    return StoreError(f"{path}: cannot be written ({error.strerror})")


def _names(folder: Path) -> Iterator[Path]:
    """Entries that may be ours, in the order of their names; nothing when the folder is not there."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if not name.startswith(".") and not _SET_ASIDE.search(name):
            yield folder / name
