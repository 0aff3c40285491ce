"""W&B, the mirror of a trial: the only file that imports wandb, and only when a run is opened.

The store holds everything. Whatever happens here (no server, a full disk, a killed upload) becomes a `TrackingWarning`, and
training goes on.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from accumulation_harness.config import ConfigError, TrackingConfig, TrackingMode
from accumulation_harness.system.processes import NoAnswer, answered

if TYPE_CHECKING:
    import wandb

AXIS = "optimizer_step"  # the metric over which W&B draws every other one

CHECK_SECONDS = 15.0  # how long a server may take to say who we are
INIT_SECONDS = 20.0
FINISH_SECONDS = 60.0  # how long the last rows may take to a server; wandb's default is for ever
LOG_SECONDS = 10.0  # and to a local log
# Rows are handed to wandb together, this often: waking its thread for every row of a fast training took 5 % of the training.
HAND_OVER_SECONDS = 1.0

_WAY_OUT = "`wandb login`, WANDB_API_KEY=…, or tracking=offline (upload later with `accumulation-harness sync`)"
_SPELLINGS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class TrackingWarning(UserWarning):
    """Something was not mirrored to W&B; the store is not affected."""


def check(config: TrackingConfig) -> None:
    """Check before a sweep that the W&B server can be reached.

    Args:
        config: The settings of the tracking; nothing is checked unless the mode is online.

    Raises:
        ConfigError: There is no valid key, or no server that answers within CHECK_SECONDS.
    """
    if config.mode != TrackingMode.online:
        return
    try:
        said = answered(_refusal, seconds=CHECK_SECONDS)
    except TimeoutError:
        said = f"no answer in {CHECK_SECONDS:.0f} s"
    except NoAnswer as error:
        said = str(error)
    if said:
        raise ConfigError("tracking.mode", "online", f"a W&B server that accepts the key ({said}); otherwise {_WAY_OUT}")


def _refusal() -> str:
    """Why the server does not accept the key; asked in a process of its own, as wandb's timeouts do not bound a silent server."""
    os.environ.update(_environment())
    import wandb

    try:
        wandb.Api(timeout=10)  # asks the server who the key belongs to
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def finish_seconds(mode: TrackingMode) -> float:
    """Return how long the end of a W&B run may take.

    Args:
        mode: The mode of the tracking.

    Returns:
        Seconds.
    """
    return FINISH_SECONDS if mode == TrackingMode.online else LOG_SECONDS


def open_run(
    config: TrackingConfig, settings: Mapping[str, Any], *, experiment: str, name: str, folder: Path, **about: Any
) -> Run:
    """Open a W&B run.

    If the mode is online and the server does not accept the run, it is opened offline, with a warning.

    Args:
        config: The settings of the tracking.
        settings: The configuration of the run.
        experiment: The group of the run.
        name: The name of the run.
        folder: The log is written under `folder`/wandb.
        **about: Further arguments of `wandb.init`, such as the job type and tags.

    Returns:
        The run.
    """
    modes = {TrackingMode.disabled: [], TrackingMode.online: [TrackingMode.online, TrackingMode.offline]}
    for mode in modes.get(config.mode, [TrackingMode.offline]):
        try:
            os.environ.update(_environment())  # read when wandb is imported and when it starts its own process
            import wandb

            run = wandb.init(
                mode=mode.value,
                project=config.project,
                entity=config.entity,
                group=experiment,
                name=name,
                config=dict(settings),
                dir=folder,
                reinit="create_new",  # else a second trial of this process would get the first one's run
                settings=wandb.Settings(
                    init_timeout=INIT_SECONDS,
                    finish_timeout=finish_seconds(mode),
                    finish_timeout_raises=True,
                    x_transaction_log_flush_interval=0.1,  # not 0, which lost rows more than a second old
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
                **about,
            )
            run.define_metric(AXIS, hidden=True)
            run.define_metric("*", step_metric=AXIS)
            return Run(run)
        except Exception as error:  # wandb's errors have no common base
            _warn(f"{experiment}/{name}: no {mode} run ({error})")
    return Run(None)


class Run:
    """A run of W&B; without a wandb run inside it does nothing.

    As a context manager it finishes, as failed after an exception.
    """

    def __init__(self, inner: wandb.Run | None) -> None:
        self._inner = inner
        self.is_whole = inner is not None  # nothing that was given to it is missing
        self._waiting: list[tuple[int, Mapping[str, float]]] = []
        self._handed_over = -math.inf  # when

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of one optimizer step, in ascending order: W&B drops a step that goes backwards.

        A process that is killed may take the rows of its last HAND_OVER_SECONDS with it.
        """
        self._waiting.append((step, metrics))
        if time.monotonic() - self._handed_over >= HAND_OVER_SECONDS:
            self._hand_over()

    def _hand_over(self) -> None:
        def log(run: wandb.Run) -> None:
            for step, metrics in self._waiting:
                # commit: without it the row waits in wandb's process for the next one, and dies with us.
                run.log({AXIS: step, **metrics}, step=step, commit=True)

        self._guarded(log, "the last rows")
        self._waiting.clear()
        self._handed_over = time.monotonic()

    def finish(self, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Add the summary and what is known of the settings by now, and close the run, in at most `finish_seconds`."""
        self._guarded(lambda run: run.config.update(dict(settings)), "the last settings")  # type: ignore[no-untyped-call]
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
            log, self._inner, self.is_whole = self._inner.settings.sync_dir, None, False
            _warn(f"{what} may be missing ({error}); what reached the local log can be uploaded: wandb sync {log}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._close(exit_code=0 if error is None else 1)


def upload(logs: Sequence[Path], project: str | None = None, entity: str | None = None) -> int:
    """Upload offline runs with `wandb sync`.

    Args:
        logs: The log files of the runs.
        project: Another project than that of the runs.
        entity: Another entity than that of the runs.

    Returns:
        The exit code of `wandb sync`.
    """
    where = [*(("--project", project) if project else ()), *(("--entity", entity) if entity else ())]
    command = [sys.executable, "-m", "wandb", "sync", *where, *(str(log.parent.resolve()) for log in logs)]
    with tempfile.TemporaryDirectory() as scratch:  # wandb's commands leave a log folder where they are called
        return subprocess.run(command, env=_environment(), cwd=scratch, stdin=subprocess.DEVNULL, check=False).returncode


@dataclass(frozen=True, kw_only=True)
class MirroredRun:
    """A run read back from W&B: `rows` are the logged metrics with `step`; `summary` also has the last value of each metric."""

    name: str
    group: str
    job_type: str
    config: dict[str, Any]
    rows: list[dict[str, float]]
    summary: dict[str, Any]


def read_online(project: str, experiment: str | None = None) -> Iterator[MirroredRun]:
    """Read the runs of a W&B project.

    Args:
        project: `entity/project`.
        experiment: Read this group of runs only.

    Yields:
        The runs; numbers are those that were logged, as far as the server keeps them.

    Raises:
        ConfigError: The project cannot be read.
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
                config=_parsed(dict(run.config)),
                rows=[{**_parsed(row), "step": row.get("_step", 0)} for row in run.scan_history()],
                summary=_parsed(dict(run.summary_metrics)),
            )
    except Exception as error:  # wandb's errors have no common base
        raise ConfigError("project", project, f"a W&B project that can be read ({error})") from error


def _environment() -> dict[str, str]:
    """Ours, with wandb kept quiet and its crash reports off: they look up a DNS name even when offline."""
    return {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", **os.environ}


def _warn(message: str) -> None:
    warnings.warn(f"W&B mirror: {message}. The store holds everything", TrackingWarning, stacklevel=3)


def _spelled(value: Any) -> Any:
    """NaN as wandb spells it in its history: in a summary it would become null."""
    if isinstance(value, Mapping):
        return {name: _spelled(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def _parsed(value: Any) -> Any:
    """The inverse of how wandb spells numbers that JSON has not, without what wandb adds."""
    if isinstance(value, dict):
        return {name: _parsed(item) for name, item in value.items() if not name.startswith("_")}
    if isinstance(value, list):
        return [_parsed(item) for item in value]
    return _SPELLINGS.get(value, value) if isinstance(value, str) else value
