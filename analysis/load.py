"""From the store to tables: one row per arm, one per trial, and the trials that have no result."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

import pandas as pd

from accumulation_harness.config import ConfigError
from accumulation_harness.judge.cause import Cause
from accumulation_harness.results import tracking
from accumulation_harness.results.arm_name import ArmName
from accumulation_harness.results.judged_arm import (
    OUTCOMES,
    VERDICT_COLUMNS,
    Ending,
    FieldError,
    StoredArm,
    VerdictRow,
    members,
    restored,
)
from accumulation_harness.results.mirror import TRIAL, own_settings
from accumulation_harness.results.record import StoredTrial, StoreError, in_one_line, read_trial
from accumulation_harness.results.store import State, Store
from accumulation_harness.results.tracking import LogError, MirroredRun, TrackingWarning

STEP_COLUMNS = ("step", "arm", "accumulation_steps", "replicate", "loss", "gradient_distance", "scale", "cosine",
                "parameter_distance", "gradient_error", "gradient_norm", "gradient_difference_norm",
                "learning_rate")  # fmt: skip


class EvidenceColumns(TypedDict):
    """The evidence that tables and figures use, of one arm."""

    gradient_error: float
    state_error: float
    trajectory_error: float
    loss_error: float
    algebra_steps: int
    algebra_floor: float
    clipping_active: bool
    clipped_share: float
    short_windows: int
    unequal_terms: bool
    parted_at: float  # window; NaN where rounding was not amplified
    rounding_high: float
    rounding_windows: int
    full_error: float
    arm_error: float
    rank_p: float
    permutations: int
    skipped: int
    final_distance: float


class SettingColumns(TypedDict):
    """What else is said of one arm: how it relates to its trial, and what was found, in words."""

    group: str  # the same for trials that differ only in their seed
    model: str
    fault: bool  # wrong on purpose
    changes: bool  # and the fault changes this trial's computation
    ragged: bool
    jump_step: float
    oracle_error: float
    counters: str
    reasons: str
    steps: int
    clip_norm: float


FULL_OUTCOMES = tuple(f"full_{name}" for name in OUTCOMES)  # of the full batch
ARM_COLUMNS = (
    *VERDICT_COLUMNS,
    *EvidenceColumns.__annotations__,
    *OUTCOMES,
    *FULL_OUTCOMES,
    *SettingColumns.__annotations__,
)
FLAGS = [
    name for kind in (VerdictRow, EvidenceColumns, SettingColumns) for name, of in get_type_hints(kind).items() if of is bool
]


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
        pd.DataFrame
    )  # one row per trial and arm: the verdict columns, evidence, outcomes of the arm and (full_*) of the full batch
    measurements: pd.DataFrame  # one row per measurement of the studies that judge no arms: settings of the trial, and its values
    trials: pd.DataFrame  # one row per finished trial: names, group, versions, seconds by phase
    missing: tuple[Missing, ...]  # running, unfinished, failed and damaged trials
    torn: tuple[Missing, ...] = ()  # finished trials whose verdicts stand, and whose step rows are missing or damaged
    foreign: tuple[str, ...] = ()  # what is in the store and not of it, a line each
    counts: frozenset[str] = frozenset()  # columns of `measurements` of whole numbers, of which pandas makes floats beside a gap

    def of(self, experiment: str) -> Results:
        """The part that belongs to one experiment."""
        return Results(
            self.arms[self.arms["experiment"] == experiment].reset_index(drop=True),
            self.measurements[self.measurements["experiment"] == experiment].dropna(axis=1, how="all").reset_index(drop=True),
            self.trials[self.trials["experiment"] == experiment].reset_index(drop=True),
            tuple(one for one in self.missing if one.experiment == experiment),
            tuple(one for one in self.torn if one.experiment == experiment),
            self.foreign,
            self.counts,
        )

    @property
    def experiments(self) -> list[str]:
        """Names of the experiments that have at least one finished trial."""
        return sorted({*self.trials["experiment"]})

    def study(self, name: str, columns: Sequence[str] = ()) -> pd.DataFrame:
        """The measurements of one study, without the columns of others; `columns` are there also when no trial is finished."""
        rows = self.measurements
        own = rows[rows["study"] == name] if "study" in rows else rows.iloc[:0]
        own = own if own.empty else own.dropna(axis=1, how="all")
        own = own.astype({name: "int64" for name in own.columns if name in self.counts and own[name].notna().all()})
        return own.reindex(columns=[*own.columns, *(name for name in columns if name not in own)]).reset_index(drop=True)

    @property
    def is_empty(self) -> bool:
        """Whether there is no finished trial."""
        return self.trials.empty


def read(results: Path | str, experiment: str | None = None) -> Results:
    """Read every `trial.json` once; step rows stay on disk. Sorted by experiment, trial, arm and accumulation steps."""
    arms, measurements, trials, missing, torn = Columns(), Columns(), Columns(), [], []
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
        arms.extend(rows)
        measurements.extend(measured)
        trials.extend([about])
        torn += [told] if status.state == State.damaged else []
    order = ["experiment", "trial", "arm", "accumulation_steps"]
    return Results(
        arms.frame(ARM_COLUMNS, order),
        measurements.frame(("experiment", "trial"), order[:2]),
        trials.frame(("experiment", "trial"), order[:2]),
        tuple(missing),
        tuple(torn),
        tuple(Store(results).foreign()),
        measurements.counts,
    )


def from_store(results: Path | str, experiment: str | None = None) -> pd.DataFrame:
    """One row per arm of every finished trial."""
    return read(results, experiment).arms


def from_wandb(source: Path | str, experiment: str | None = None) -> pd.DataFrame:
    """One row per arm of every finished run that W&B has: the columns of `verdicts.csv`, the outcomes, `group` and `model`.

    FieldError names the run where one is missing. A log that is damaged, or has no end, is left out with a `TrackingWarning`.
    `source`: a folder with offline runs (a store is one), or the project on
    a server, `entity/project`. What rests on the evidence of a verdict is in the store alone.
    """
    rows = Columns()
    names = (*VERDICT_COLUMNS, *OUTCOMES)
    for run in _mirrored(source, experiment):
        for arm in run.summary.get("arms", {}).values():
            full = restored(Ending, run.summary["reference"], f"reference of {run.name}")
            row = dict(zip(names, members(arm, f"an arm of {run.name}", names), strict=True))
            about = {"group": group(own_settings(run.config)), "model": f"{row['workload']} {row['norm']}"}
            rows.extend([{**row, **_of_full_batch(full), **about}])
    return rows.frame(VERDICT_COLUMNS, ["experiment", "trial", "arm", "accumulation_steps"])


def steps_from_wandb(source: Path | str, experiment: str | None = None) -> pd.DataFrame:
    """Step rows of the runs that W&B has, one per arm and step, with `experiment` and `trial`, as `steps` gives them.

    A log that is damaged, or has no end, is left out with a `TrackingWarning`.
    """
    rows = Columns()
    for run in _mirrored(source, experiment):
        for logged in run.rows:
            arms: dict[ArmName, dict[str, Any]] = {}
            for name, value in logged.items():
                metric, _, arm = name.partition("/")  # as `flat_metrics` writes it
                with suppress(ValueError):  # a metric of no arm
                    arms.setdefault(ArmName.parse(arm), {})[metric] = value
            about = {"experiment": run.group, "trial": run.name, "step": logged["step"]}
            rows.extend({**about, **arm.columns, **metrics} for arm, metrics in arms.items())
    return rows.frame(("experiment", "trial", *STEP_COLUMNS), ["experiment", "trial", "step"])


def _mirrored(source: Path | str, experiment: str | None) -> Iterator[MirroredRun]:
    folder = Path(source)
    if not folder.is_dir():
        if str(source).count("/") != 1 or Path(source).is_absolute():
            raise ConfigError("source", source, "a folder with offline runs, or a project on a W&B server as entity/project")
        yield from (run for run in tracking.read_online(str(source), experiment) if run.job_type in ("", TRIAL))
        return
    for log in sorted(folder.rglob("*.wandb")):
        try:
            run = tracking.read_offline(log)
        except LogError as error:
            warnings.warn(f"left out: {error}", TrackingWarning, stacklevel=3)
            continue
        if experiment not in (None, run.group) or run.job_type not in ("", TRIAL):
            continue
        if run.ended:
            yield run
        else:
            message = f"left out: {log} has no end: it is being written, its process was killed, or a part was lost"
            warnings.warn(message, TrackingWarning, stacklevel=3)


def steps(results: Path | str, experiment: str, trials: Iterable[str]) -> tuple[pd.DataFrame, tuple[Missing, ...]]:
    """Step rows of the trials named, with a column `trial`; and the trials whose rows cannot be read."""
    store, frames, missing = Store(results), [], []
    for name in trials:
        try:
            frames.append(store.steps(read_trial(store.folder(experiment, name))).assign(trial=name))
        except (StoreError, FileNotFoundError) as error:
            missing.append(Missing(experiment, name, str(State.damaged), _one_line(error)))
    rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=[*STEP_COLUMNS, "trial"])
    return rows, tuple(missing)


class Columns:
    """Rows collected by column: a tenth of the memory of as many dictionaries."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}
        self._length = 0

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows; what a row lacks is None."""
        for row in rows:
            for name in row.keys() - self._values.keys():
                self._values[name] = [None] * self._length
            for name, values in self._values.items():
                values.append(row.get(name))
            self._length += 1

    @property
    def counts(self) -> frozenset[str]:
        """The columns in which every value is a whole number, where there is one."""
        return frozenset(
            name for name, values in self._values.items() if {type(value) for value in values if value is not None} == {int}
        )

    def frame(self, columns: Sequence[str], order: list[str]) -> pd.DataFrame:
        """Sorted; `columns` come first, and exist also when there are no rows."""
        names = (*columns, *sorted(self._values.keys() - set(columns)))
        kinds = dict.fromkeys(names, object) | dict.fromkeys(FLAGS, bool)
        frame = pd.DataFrame({name: self._values.get(name, []) for name in names})
        if frame.empty:  # without values pandas cannot know that names are text and flags truth values
            frame = frame.astype({name: kinds[name] for name in names})
        return frame.sort_values(order, kind="stable", ignore_index=True)


def _arms(trial: StoredTrial) -> list[dict[str, Any]]:
    """A row per arm; no two arms have the same name and N."""
    if not trial.arms:
        return []
    shared, full = group(trial.config), _of_full_batch(restored(Ending, trial.record["reference"], "reference"))
    rows = [{**_arm(trial, shared, arm), **full} for arm in trial.arms]
    if len({(row["arm"], row["accumulation_steps"]) for row in rows}) < len(rows):
        raise FieldError("arms: two of the same name and N")
    return rows


def _measurements(trial: StoredTrial) -> list[dict[str, Any]]:
    """A row per measurement, with the settings of the trial; none of a trial whose arms were judged."""
    measured = trial.record.get("measurements") or []
    about = settings(trial) if measured else {}
    return [{**about, **row} for row in measured]


def _arm(trial: StoredTrial, group: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """A flat row, without the full batch; FieldError or KeyError names a field that the trial should have and has not."""
    arm, config = StoredArm.read(stored), trial.config
    algebra, rounding, row = arm.algebra, arm.rounding, arm.row
    if (row.experiment, row.trial) != (trial.experiment, trial.trial):
        raise FieldError(f"arm: belongs to {row.experiment}/{row.trial}")
    planted: Mapping[str, bool] = trial.record["faults"]  # fault arm -> whether it changes this trial's computation
    evidence = EvidenceColumns(
        gradient_error=algebra.gradient_error,
        state_error=algebra.state_error,
        trajectory_error=algebra.trajectory_error,
        loss_error=algebra.loss_error,
        algebra_steps=algebra.steps,
        algebra_floor=algebra.floor,
        clipping_active=algebra.clipping_active,
        clipped_share=algebra.clipped_share,
        short_windows=algebra.short_windows,
        unequal_terms=algebra.unequal_terms,
        parted_at=_number(algebra.parted_at),
        rounding_high=rounding.high,
        rounding_windows=rounding.windows,
        full_error=rounding.full_error,
        arm_error=rounding.arm_error,
        rank_p=rounding.rank_p,
        permutations=rounding.permutations,
        skipped=rounding.skipped,
        final_distance=arm.trajectory.final_distance,
    )
    about = SettingColumns(
        group=group,
        model=f"{row.workload} {row.norm}",
        fault=row.arm in planted,
        changes=bool(planted.get(row.arm, False)),
        ragged=config["split"] == "ragged" or config["workload"]["data"] == "text",
        jump_step=_number(arm.trajectory.jump_step),
        oracle_error=_number(arm.explanations.get(Cause.batch_statistics)),
        counters=", ".join(arm.counters),
        reasons="; ".join(arm.reasons),
        steps=int(config["steps"]),
        clip_norm=_number(config["clip_norm"]),
    )
    return {**vars(row), **evidence, **vars(arm.ending), **about}


def _of_full_batch(ending: Ending) -> dict[str, float]:
    return {f"full_{name}": value for name, value in vars(ending).items()}


def settings(trial: StoredTrial) -> dict[str, Any]:
    """What distinguishes a trial from others: the scalar settings, those of the optimizer and the model by their own names."""
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
    environment, phases = trial.environment, dict(_phases(trial.record["seconds"]))
    makers = list(dict(trial.record.get("measured_by") or {}).values())
    return {
        "experiment": trial.experiment,
        "trial": trial.trial,
        "rows": int(trial.num_rows),
        "measured": len(makers),
        "found": sum(maker != f"{trial.experiment}/{trial.trial}" for maker in makers),
        "seconds": math.fsum(phases.values()),
        "device": str(environment.get("device", "unknown")),
        "environment": " · ".join(_versions(environment)),
        **{f"seconds_{name}": value for name, value in phases.items()},
    }


def _phases(seconds: Any) -> Iterator[tuple[str, float]]:
    """Seconds by phase, whether they were stored so or as one number."""
    if isinstance(seconds, Mapping):
        yield from ((str(name), float(value)) for name, value in seconds.items() if name != "total")
    else:
        yield "trial", float(seconds)


def _versions(environment: Mapping[str, Any]) -> Iterator[str]:
    for name, value in environment.items():
        if isinstance(value, Mapping):
            yield from (f"{package} {version}" for package, version in value.items())
        elif value is not None:
            yield f"{name} {value}"


def group(config: Mapping[str, Any]) -> str:
    """Name of the trials that differ only in their seed, the same for 0 and 0.0: W&B does not tell them apart."""
    return _digest(json.dumps({name: value for name, value in config.items() if name != "seed"}))


@lru_cache(maxsize=1024)
def _digest(settings: str) -> str:
    """Of settings in JSON, whatever their order, each whole number as a double."""
    plain = json.dumps(json.loads(settings, parse_int=float), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:10]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _one_line(error: Exception) -> str:
    return in_one_line(f"{type(error).__name__}: {error}")
