"""W&B, the mirror of a trial: the only file that imports wandb, and only when a run is opened.

The store holds everything. Whatever happens here (no server, a full disk, a killed upload) becomes a `TrackingWarning`, and
training goes on.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from accumulation_harness.config import ConfigError, TrackingConfig, TrackingMode
from accumulation_harness.results.record import read_file

if TYPE_CHECKING:
    import wandb

AXIS = "optimizer_step"  # the metric over which W&B draws every other one

CHECK_SECONDS = 15.0  # how long a server may take to say who we are
INIT_SECONDS = 20.0
FINISH_SECONDS = 60.0  # how long the last rows may take to a server; wandb's default is for ever
UPLOAD_SECONDS = 10.0  # of a run that was made offline, at most
LOG_SECONDS = 10.0  # and to a local log
# What the log of a killed process may lack at its end; 15 s by default. Not 0: that lost rows more than a second old.
FLUSH_SECONDS = 0.1
# Rows are handed to wandb together, this often: waking its thread for every row of a fast training took 5 % of the training.
HAND_OVER_SECONDS = 1.0

_WAY_OUT = "`wandb login`, WANDB_API_KEY=…, or tracking=offline (upload later with `wandb sync`)"
# A process of its own, because wandb's own timeouts do not bound a server that accepts the connection and stays silent.
_CHECK = """
import sys, wandb
try:
    wandb.Api(timeout=10)  # asks the server who the key belongs to
except Exception as error:
    sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
"""


class TrackingWarning(UserWarning):
    """Something was not mirrored to W&B; the store is not affected."""


class LogError(ValueError):
    """A W&B log that is not as it was written; the message names the file and the place."""


def check(config: TrackingConfig) -> None:
    """Before a sweep: raise ConfigError within 20 s when mode is online and there is no valid key or no server that answers."""
    if config.mode != TrackingMode.online:
        return
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CHECK],
            env=_environment(),
            stdin=subprocess.DEVNULL,  # never ask for a key
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _offline_advice(f"no answer in {CHECK_SECONDS:.0f} s") from None
    if child.returncode != 0:
        raise _offline_advice((child.stderr.strip().splitlines() or ["the check died"])[-1])


def finish_seconds(mode: TrackingMode) -> float:
    """How long the end of a run may take."""
    return FINISH_SECONDS if mode == TrackingMode.online else LOG_SECONDS


def open_run(
    config: TrackingConfig,
    settings: Mapping[str, Any],
    *,
    experiment: str,
    name: str,
    folder: Path,
    job_type: str | None = None,
    tags: Sequence[str] = (),
) -> Run:
    """A W&B run, logged under `folder`/wandb: its group is the experiment, its config `settings`.

    Mode online falls back to offline, with a warning, when the server does not take the run.
    """
    if config.mode == TrackingMode.disabled:
        return Run(None)
    modes = [TrackingMode.online, TrackingMode.offline] if config.mode == TrackingMode.online else [TrackingMode.offline]
    for mode in modes:
        try:
            opened = _init(config, mode, settings, experiment=experiment, name=name, folder=folder, job_type=job_type, tags=tags)
            return Run(opened)
        except Exception as error:  # wandb's errors have no common base
            _warn(f"{experiment}/{name}: no {mode} run ({error})")
    return Run(None)


class Run:
    """A run of W&B; without a wandb run inside it does nothing.

    As a context manager it finishes, as failed after an exception.
    """

    def __init__(self, inner: wandb.Run | None) -> None:
        self._inner = inner
        self._step = -1
        self._waiting: list[tuple[int, dict[str, float]]] = []
        self._handed_over = -math.inf  # when
        self.path = Path(inner.settings.sync_file) if inner is not None else None  # the local log; `wandb sync` takes its folder

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of one optimizer step; steps ascend, because W&B drops a step that goes backwards.

        A process that is killed may take the rows of its last HAND_OVER_SECONDS with it.
        """
        assert step > self._step, f"expected a step after {self._step}, got {step}"
        self._step = step
        self._waiting.append((step, dict(metrics)))
        if time.monotonic() - self._handed_over >= HAND_OVER_SECONDS:
            self._hand_over()

    def _hand_over(self) -> None:
        def log(run: wandb.Run) -> None:
            for step, metrics in self._waiting:
                # commit: without it the row waits in wandb's process for the next one, and dies with us.
                run.log({AXIS: step, **metrics}, step=step, commit=True)

        if self._waiting:
            self._guarded(log, f"the rows from step {self._waiting[0][0]} on")
            self._waiting.clear()
            self._handed_over = time.monotonic()

    def finish(self, summary: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> None:
        """Add the summary and what is known of the settings by now, and close the run, in at most `finish_seconds`.

        A second call does nothing.
        """
        self._hand_over()
        self._guarded(lambda run: run.config.update(dict(settings or {})), "the last settings")  # type: ignore[no-untyped-call]
        self._guarded(lambda run: run.summary.update(_spelled(summary)), "the summary")
        self._close(exit_code=0)

    def show(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table, which W&B sorts, filters and groups."""
        import wandb

        self._guarded(lambda run: run.log({name: wandb.Table(columns=list(columns), data=list(rows))}), f"the table {name}")

    def show_images(self, images: Mapping[str, Path]) -> None:
        """Pictures by name; their files may be gone when the run is closed."""
        import wandb

        self._guarded(lambda run: run.log({name: wandb.Image(str(path)) for name, path in images.items()}), "the images")

    def _close(self, exit_code: int) -> None:
        self._hand_over()
        self._guarded(lambda run: run.finish(exit_code=exit_code), "the end of the run")
        self._inner = None

    def _guarded(self, call: Callable[[wandb.Run], None], what: str) -> None:
        """Call wandb; its first error ends the mirror, not the training."""
        if self._inner is None:
            return
        try:
            call(self._inner)
        except Exception as error:  # whatever wandb raises
            self._inner = None
            _warn(f"{what} may be missing ({error}); what reached the local log can be uploaded: wandb sync {self._folder()}")

    def _folder(self) -> Path | None:
        return self.path.parent if self.path is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(exit_code=0 if error is None else 1)


@dataclass(frozen=True, kw_only=True)
class MirroredRun:
    """A run read back: `rows` are the logged metrics with `step`; `summary` also holds the last value of each metric.

    `ended`: whether it was closed. If not, its process was killed or still writes, and what came last may be missing.
    """

    name: str
    group: str
    job_type: str  # empty in the logs of older versions, which had runs of trials alone
    project: str
    tags: tuple[str, ...]
    config: dict[str, Any]
    rows: list[dict[str, float]]
    summary: dict[str, Any]
    ended: bool = True


def read_offline(path: Path) -> MirroredRun:
    """Read the one `.wandb` log at or under `path`, also of a run that was killed; ValueError when there is not exactly one.

    Numbers are those that were logged, except that -0.0 reads as 0.0. The log is read whole, or refused with a LogError.
    """
    logs = sorted(path.rglob("*.wandb")) if path.is_dir() else [path]
    if len(logs) != 1:
        raise ValueError(f"expected one .wandb file under {path}, got {len(logs)}")
    records = _inspect(logs[0], at_least=_num_records(logs[0]))
    run = next((record["run"] for record in records if record["type"] == "run"), None)
    if run is None:
        raise LogError(f"{logs[0]}: it ends before the run is named")
    summary: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for record in records:
        if record["type"] == "summary":
            summary |= _parsed(record["summary"].get("update", {}))
        elif record["type"] in ("run", "config"):  # the first settings, and those that were added
            config |= _parsed((record["run"] if record["type"] == "run" else record)["config"].get("update", {}))
    return MirroredRun(
        name=run.get("display_name", ""),
        group=run.get("run_group", ""),
        job_type=run.get("job_type", ""),
        project=run.get("project", ""),
        tags=tuple(run.get("tags", ())),
        config=_own(config),
        rows=[_row(record["history"]) for record in records if record["type"] == "history"],
        summary=_own(summary),
        ended=records[-1]["type"] == "exit",
    )


def end() -> None:
    """End wandb's own process, where one was started here, before ours ends."""
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()


def is_uploaded(log: Path) -> bool:
    """Whether W&B has the whole log, as far as is known here."""
    return Path(f"{log}.synced").exists()


def upload(logs: Sequence[Path], project: str | None = None, entity: str | None = None) -> list[Path]:
    """Send offline runs to the server, to another project or entity than they were made for if that is said; those not taken."""
    where = [*(("--project", project) if project else ()), *(("--entity", entity) if entity else ())]
    command = [sys.executable, "-m", "wandb", "sync", *where, *(str(log.parent.resolve()) for log in logs)]
    with tempfile.TemporaryDirectory() as scratch, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command,
            env=_environment(),
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FINISH_SECONDS + UPLOAD_SECONDS * len(logs),  # its own patience with a silent server has no end
            check=False,
        )
    return [log for log in logs if not is_uploaded(log)]


def read_online(project: str, experiment: str | None = None) -> Iterator[MirroredRun]:
    """The runs of a W&B project (`entity/project`), of one experiment or of all; ConfigError when the server does not know us.

    Numbers are those that were logged, as far as the server keeps them.
    """
    os.environ.update(_environment())
    import wandb

    try:
        api = wandb.Api(timeout=int(INIT_SECONDS))
        for run in api.runs(project, filters={"group": experiment} if experiment else {}, lazy=False):
            yield MirroredRun(
                name=run.display_name,
                group=run.group or "",
                job_type=run.job_type or "",
                project=str(run.project),
                tags=tuple(run.tags),
                config=_own(_parsed(dict(run.config))),
                rows=[_own(_parsed(row)) | {"step": row.get("_step", 0)} for row in run.scan_history()],
                summary=_own(_parsed(dict(run.summary_metrics))),
            )
    except Exception as error:  # wandb's errors have no common base
        raise ConfigError("project", project, f"a W&B project that can be read ({error})") from error


def _init(
    config: TrackingConfig,
    mode: TrackingMode,
    run_settings: Mapping[str, Any],
    *,
    experiment: str,
    name: str,
    folder: Path,
    job_type: str | None,
    tags: Sequence[str],
) -> wandb.Run:
    os.environ.update(_environment())  # read when wandb is imported and when it starts its own process
    import wandb

    run = wandb.init(
        mode=mode.value,
        project=config.project,
        entity=config.entity,
        group=experiment,
        name=name,
        job_type=job_type,
        tags=list(tags),
        config=dict(run_settings),
        dir=folder,
        reinit="create_new",  # else a second trial of this process would get the first one's run
        settings=wandb.Settings(
            init_timeout=INIT_SECONDS,
            finish_timeout=finish_seconds(mode),
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=FLUSH_SECONDS,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            disable_code=True,
            disable_git=True,
            console="off",
            silent=True,
            symlink=False,
        ),
    )
    run.define_metric(AXIS, hidden=True)
    run.define_metric("*", step_metric=AXIS)
    return run


_BLOCK, _HEADER = 32768, struct.Struct("<IHB")  # LevelDB's log format: CRC-32, length and type of each piece of a record
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MAGIC = b":W&B\xe1\xbe\x00"


def _num_records(log: Path) -> int:
    """How many records are whole. LogError where a checksum does not hold or a piece is out of place.

    Only the last record may be cut, as a killed process leaves it. wandb's own reader passes over what it cannot read.
    """
    try:
        content = memoryview(read_file(log))
    except OSError as error:
        raise LogError(f"{log}: {error.strerror}") from error
    if content[: len(_MAGIC)] != _MAGIC[: len(content)]:
        raise LogError(f"{log}: not a W&B log")
    place, number, is_open = len(_MAGIC), 0, False
    while place < len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER.size:  # too little for a piece: the rest of a block is zeros
            if any(content[place : place + left]):
                raise LogError(f"{log}: damaged at byte {place}")
            place += left
            continue
        piece = content[place + _HEADER.size : place + left]
        if len(content) < place + _HEADER.size:
            break
        checksum, length, kind = _HEADER.unpack_from(content, place)
        if length > len(piece) and place + left > len(content):
            break
        fits = length <= len(piece) and kind in ((_MIDDLE, _LAST) if is_open else (_FULL, _FIRST))
        if not fits or zlib.crc32(piece[:length], zlib.crc32(bytes([kind]))) != checksum:
            raise LogError(f"{log}: damaged at byte {place}")
        is_open = kind in (_FIRST, _MIDDLE)
        number += not is_open
        place += _HEADER.size + length
    return number


def _inspect(log: Path, at_least: int) -> list[dict[str, Any]]:
    """The records of a `.wandb` file, in which so many are whole; LogError where they are not all there."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log.resolve())]
    with tempfile.TemporaryDirectory() as scratch:  # wandb's commands leave a log folder where they are called
        done = subprocess.run(
            command, env=_environment(), cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise LogError(f"{log}: wandb cannot read it ({(done.stderr.strip().splitlines() or ['no reason given'])[-1]})")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    if len(records) < at_least or [record.get("num") for record in records] != list(range(1, 1 + len(records))):
        raise LogError(f"{log}: its records are not in their order, or not all there")
    return records


def _environment() -> dict[str, str]:
    """Ours, with wandb kept quiet and its crash reports off: they look up a DNS name even when offline."""
    return {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", **os.environ}


def _offline_advice(reason: str) -> ConfigError:
    return ConfigError("tracking.mode", "online", f"a W&B server that knows us ({reason}); the way out: {_WAY_OUT}")


def _warn(message: str) -> None:
    warnings.warn(f"W&B mirror: {message}. The store holds everything", TrackingWarning, stacklevel=3)


_SPELLINGS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _spelled(value: Any) -> Any:
    """NaN as wandb spells it in its history: in a summary it would become null."""
    if isinstance(value, Mapping):
        return {name: _spelled(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def _parsed(value: Any) -> Any:
    """The inverse of how wandb spells numbers that JSON has not."""
    if isinstance(value, dict):
        return {name: _parsed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_parsed(item) for item in value]
    return _SPELLINGS.get(value, value) if isinstance(value, str) else value


def _own(items: dict[str, Any]) -> dict[str, Any]:
    """Without what wandb adds."""
    return {name: value for name, value in items.items() if not name.startswith("_")}


def _row(history: dict[str, Any]) -> dict[str, float]:
    return {"step": history["step"].get("num", 0), **_own(_parsed(history["item"]))}
