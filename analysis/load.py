"""From the store to tables: one row per arm, one per trial, and the trials that have no result."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

import pandas as pd
from pandas import DataFrame

from accumulation_harness.config import ConfigError
from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.results import tracking
from accumulation_harness.results.judged_arm import EVIDENCE_COLUMNS, OUTCOMES, VERDICT_COLUMNS, EvidenceRow, VerdictRow
from accumulation_harness.results.mirror import TRIAL, own_settings
from accumulation_harness.results.record import StoredTrial, StoreError, in_one_line, read_trial
from accumulation_harness.results.step_row import STEP_COLUMNS
from accumulation_harness.results.store import State, Store
from accumulation_harness.results.tracking import MirroredRun


class SettingColumns(TypedDict):
    """What else is said of one arm: how it relates to its trial."""

    group: str  # the same for trials that differ only in their seed
    ragged: bool
    steps: int
    clip_norm: float
    model: str
    fault: bool  # wrong on purpose
    changes: bool  # and the fault changes this trial's computation


FULL_OUTCOMES = tuple(f"full_{name}" for name in OUTCOMES)  # of the full batch
STORED_COLUMNS = (*VERDICT_COLUMNS, *EVIDENCE_COLUMNS, *OUTCOMES, "reasons")  # of an arm
ARM_COLUMNS = (*STORED_COLUMNS, *FULL_OUTCOMES, *SettingColumns.__annotations__)
FLAGS = [name for kind in (VerdictRow, EvidenceRow, SettingColumns) for name, of in get_type_hints(kind).items() if of is bool]
_stored = itemgetter(*STORED_COLUMNS)


class Unmeasured(LookupError):
    """No trial of a study is finished, or none of the kind that is asked for."""


def needed(*found: Sized) -> None:
    """Raises Unmeasured where one of these is empty: what would be made of them is left out."""
    if not all(map(len, found)):
        raise Unmeasured


@dataclass(frozen=True)
class Missing:
    """A trial without a usable result."""

    experiment: str
    trial: str
    state: str
    detail: str


@dataclass(frozen=True)
class Results:
    """Everything the small files of a store say."""

    arms: (
        DataFrame  # one row per trial and arm: the verdict columns, evidence, outcomes of the arm and (full_*) of the full batch
    )
    measurements: DataFrame  # one row per measurement of the studies that judge no arms: settings of the trial, and its values
    trials: DataFrame  # one row per finished trial: names, group, versions, seconds by phase
    missing: tuple[Missing, ...]  # running, unfinished, failed and damaged trials
    torn: tuple[Missing, ...] = ()  # finished trials whose verdicts stand, and whose step rows are missing or damaged
    stale: tuple[Missing, ...] = ()  # whose code or data have changed since; their verdicts are those of the former ones

    def of(self, experiment: str) -> Results:
        """The part that belongs to one experiment."""
        arms, measurements, trials = (
            frame[frame["experiment"] == experiment].reset_index(drop=True)
            for frame in (self.arms, self.measurements, self.trials)
        )
        missing, torn = (tuple(one for one in known if one.experiment == experiment) for known in (self.missing, self.torn))
        told = measurements.dropna(axis=1, how="all") if len(measurements) else measurements  # else no column would be left
        return Results(arms, told, trials, missing, torn)

    @property
    def experiments(self) -> list[str]:
        """Names of the experiments that have at least one finished trial."""
        return sorted({*self.trials["experiment"]})

    def study(self, name: str, columns: Sequence[str] = ()) -> DataFrame:
        """Choose the measurements of one study, without the columns of others.

        Args:
            name: The study.
            columns: Columns that are there also when they are empty.

        Returns:
            A row for each measurement.

        Raises:
            Unmeasured: There are none.
        """
        if not self.has(name):
            raise Unmeasured(name)
        own = self.measurements[self.measurements["study"] == name].dropna(axis=1, how="all").infer_objects()
        return own.reindex(columns=[*own.columns, *(name for name in columns if name not in own)]).reset_index(drop=True)

    def has(self, study: str) -> bool:
        """Whether a trial of the study is finished."""
        return study in set(self.measurements.get("study", ()))

    @property
    def is_empty(self) -> bool:
        """Whether there is no finished trial."""
        return self.trials.empty


def read(results: Path | str, experiment: str | None = None) -> Results:
    """Read every `trial.json` once; step rows stay on disk. Sorted by experiment, trial, arm and accumulation steps.

    Args:
        results: The folder of the store.
        experiment: The only one that is read, or None for all.

    Returns:
        Arms, trials and measurements, and what is missing.
    """
    arms: list[tuple[Any, ...]] = []
    measurements: list[dict[str, Any]] = []
    trials, missing, torn, stale = [], [], [], []
    for status in Store(results).status(experiment):
        told = Missing(status.experiment, status.trial, str(status.state), status.detail)
        if (trial := status.stored) is None:
            missing.append(told)
            continue
        try:
            rows, measured, about = _arms(trial), _measurements(trial), _trial(trial)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # not written by this engine
            missing.append(replace(told, state=str(State.damaged), detail=_one_line(error)))
            continue
        arms += rows
        measurements += measured
        trials.append(about)
        torn += [told] if status.state == State.damaged else []
        stale += [told] if status.state == State.stale else []
    order = ["experiment", "trial", "arm", "accumulation_steps"]
    return Results(
        _frame(dict(zip(ARM_COLUMNS, zip(*arms, strict=True), strict=False)), ARM_COLUMNS, order),
        _table(measurements, order[:2], order[:2], object),  # a whole number beside another study's gap stays one
        _table(trials, order[:2], order[:2]),
        tuple(missing),
        tuple(torn),
        tuple(stale),
    )


def from_store(results: Path | str, experiment: str | None = None) -> DataFrame:
    """Read the verdicts of a store.

    Args:
        results: The folder of the store.
        experiment: Read this experiment only.

    Returns:
        A table with one row per arm of every finished trial: the columns of `verdicts.csv`, the evidence, `group` (the same
        for trials that differ in their seed alone) and `model`; empty if the folder has no finished trial.
    """
    return read(results, experiment).arms


def from_wandb(project: str, experiment: str | None = None) -> DataFrame:
    """Read the verdicts from a W&B project.

    Args:
        project: `entity/project`.
        experiment: Read this experiment only.

    Returns:
        A table with one row per arm of every finished run: the columns of `verdicts.csv`, the outcomes, `group` and `model`.
        The evidence of a verdict is only in the store.

    Raises:
        ConfigError: The project cannot be read.
    """
    rows = []
    for run in _mirrored(project, experiment):
        for arm in run.summary.get("arms", {}).values():
            about = {"group": group(own_settings(run.config)), "model": f"{arm['workload']} {arm['norm']}"}
            own = {name: arm[name] for name in (*VERDICT_COLUMNS, *OUTCOMES)}
            rows.append(own | _of_full_batch(run.summary["reference"]) | about)
    return _table(rows, VERDICT_COLUMNS, ["experiment", "trial", "arm", "accumulation_steps"])


def steps_from_wandb(project: str, experiment: str | None = None) -> DataFrame:
    """Read the metrics of every optimizer step from a W&B project.

    Args:
        project: `entity/project`.
        experiment: Read this experiment only.

    Returns:
        A table with one row per arm and step, with `experiment` and `trial`, as `steps` gives it.

    Raises:
        ConfigError: The project cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for run in _mirrored(project, experiment):
        for logged in run.rows:
            arms: dict[ArmName, dict[str, Any]] = {}
            for name, value in logged.items():
                metric, _, arm = name.partition("/")  # as `flat_metrics` writes it
                with suppress(ValueError):  # a metric of no arm
                    arms.setdefault(ArmName.parse(arm), {})[metric] = value
            about = {"experiment": run.group, "trial": run.name, "step": logged["step"]}
            rows += [{**about, **arm.columns, **metrics} for arm, metrics in arms.items()]
    return _table(rows, ("experiment", "trial", *STEP_COLUMNS), ["experiment", "trial", "step"])


def _mirrored(project: str, experiment: str | None) -> Iterator[MirroredRun]:
    if project.count("/") != 1 or project.startswith("/"):
        raise ConfigError("project", project, "a project on a W&B server, as entity/project")
    return (run for run in tracking.read_online(project, experiment) if run.job_type in ("", TRIAL))


def steps(results: Path | str, experiment: str, trials: Iterable[str]) -> tuple[DataFrame, tuple[Missing, ...]]:
    """Read the metrics of every optimizer step from a store.

    Args:
        results: The folder of the store.
        experiment: The experiment.
        trials: Names of its trials.

    Returns:
        A table with one row per arm and step, with a column `trial`; and the trials whose rows cannot be read.
    """
    store, frames, missing = Store(results), [], []
    for name in trials:
        try:
            frames.append(store.steps(read_trial(store.folder(experiment, name))).assign(trial=name))
        except (StoreError, FileNotFoundError) as error:
            missing.append(Missing(experiment, name, str(State.damaged), _one_line(error)))
    rows = pd.concat(frames, ignore_index=True) if frames else DataFrame(columns=[*STEP_COLUMNS, "trial"])
    return rows, tuple(missing)


def _table(rows: list[dict[str, Any]], first: Sequence[str], order: list[str], dtype: type | None = None) -> DataFrame:
    """The rows, sorted; the columns `first` are there also when there are no rows."""
    frame = DataFrame(rows, dtype=dtype)
    names = dict.fromkeys((*first, *sorted(map(str, frame))))
    return frame.reindex(columns=[*names]).sort_values(order, kind="stable", ignore_index=True)


def _frame(values: Mapping[str, Sequence[Any]], names: Sequence[str], order: list[str]) -> DataFrame:
    frame = DataFrame(dict(values), columns=list(names))
    if frame.empty:  # without values pandas cannot know that names are text and flags truth values
        frame = frame.astype({name: bool if name in FLAGS else object for name in names})
    return frame.sort_values(order, kind="stable", ignore_index=True)


def _arms(trial: StoredTrial) -> list[tuple[Any, ...]]:
    """ARM_COLUMNS of each arm; no two have the same name and N. KeyError names a column that is missing."""
    if not trial.arms:
        return []
    config, planted = trial.config, trial.record["faults"]  # fault arm -> whether it changes this trial's computation
    full = _of_full_batch(trial.record["reference"]).values()
    is_ragged = config["split"] == "ragged" or config["workload"]["data"] == "text"
    clip_norm = math.nan if config["clip_norm"] is None else float(config["clip_norm"])
    shared = (*full, group(config), is_ragged, int(config["steps"]), clip_norm)
    if len({(arm["arm"], arm["accumulation_steps"]) for arm in trial.arms}) < len(trial.arms):
        raise ValueError("two arms of the same name and N")
    return [
        (*_stored(arm), *shared, f"{arm['workload']} {arm['norm']}", arm["arm"] in planted, planted.get(arm["arm"], False))
        for arm in trial.arms
    ]


def _measurements(trial: StoredTrial) -> list[dict[str, Any]]:
    """A row per measurement, with the settings of the trial; none of a trial whose arms were judged."""
    measured = trial.record.get("measurements") or []
    about = settings(trial) if measured else {}
    return [{**about, **row} for row in measured]


def _of_full_batch(ending: Mapping[str, float]) -> dict[str, float]:
    return {f"full_{name}": ending[name] for name in OUTCOMES}


def settings(trial: StoredTrial) -> dict[str, Any]:
    """Return the settings of a trial as columns of a table.

    Args:
        trial: The trial.

    Returns:
        All scalar settings; those of the optimizer and the model have their own names without a prefix.
    """
    config = trial.config
    nested = {**config.get("workload", {}), **config.get("optimizer", {})}
    scalars = {name: value for name, value in {**nested, **config}.items() if not isinstance(value, (dict, list))}
    return {
        **scalars,
        "experiment": trial.experiment,
        "trial": trial.trial,
        "group": group(config),
        "optimizer": nested.get("name"),
        "workload": nested.get("data"),
    }


def _trial(trial: StoredTrial) -> dict[str, Any]:
    environment, phases = trial.environment, trial.seconds
    makers = list(dict(trial.record.get("measured_by") or {}).values())
    return {
        "experiment": trial.experiment,
        "trial": trial.trial,
        "ended": (trial.folder / "trial.json").stat().st_mtime,
        "rows": int(trial.record["steps"]),
        "measured": len(makers),
        "found": sum(maker != f"{trial.experiment}/{trial.trial}" for maker in makers),
        "seconds": math.fsum(phases.values()),
        "device": str(environment.get("device", "unknown")),
        "environment": _in_a_line(json.dumps(environment)),
        **{f"seconds_{name}": value for name, value in phases.items()},
    }


@lru_cache(maxsize=1024)
def _in_a_line(environment: str) -> str:
    """Of an environment in JSON, which many trials share."""
    return " · ".join(_versions(json.loads(environment)))


def _versions(environment: Mapping[str, Any]) -> Iterator[str]:
    for name, value in environment.items():
        if isinstance(value, Mapping):
            yield from (f"{package} {version}" for package, version in value.items())
        elif value is not None:
            yield f"{name} {value}"


def group(config: Mapping[str, Any]) -> str:
    """Name of the trials that differ only in their seed, the same for 0 and 0.0: W&B does not tell them apart.

    Args:
        config: All settings of a trial.

    Returns:
        A hash.
    """
    return _digest(json.dumps({name: value for name, value in config.items() if name != "seed"}))


@lru_cache(maxsize=1024)
def _digest(settings: str) -> str:
    """Of settings in JSON, whatever their order, each whole number as a double."""
    plain = json.dumps(json.loads(settings, parse_int=float), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:10]


def _one_line(error: Exception) -> str:
    return in_one_line(f"{type(error).__name__}: {error}")
