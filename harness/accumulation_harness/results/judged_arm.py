"""A judged arm in `trial.json`: the one definition of its fields, which `trial` writes and `analysis.load` reads.

Stored fields have the names of the dataclasses here and in `judge.verdict`. What was stored under another name, or not
at all, is an error that says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from typing_extensions import Self

from accumulation_harness.config import Precision, TrialConfig
from accumulation_harness.identity import identity
from accumulation_harness.judge.verdict import Algebra, Evidence, Outcome, Rounding, Trajectory, Verdict
from accumulation_harness.results.arm_name import ArmName

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Fields = TypeVar("Fields", bound="DataclassInstance")


class FieldError(ValueError):
    """A stored record that lacks a field, or has one that this version does not know or cannot take; the message names it."""


# What a field of a dataclass may be in JSON, exactly: a truth value is no number there.
_STORED = {float: (float, int), int: (int,), str: (str,), bool: (bool,), type(None): (type(None),), tuple: (list, tuple)}


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """The columns of `verdicts.csv`, in their order. Measures are explained at `Algebra`, `Rounding` and `Trajectory`."""

    experiment: str
    trial: str  # its identity
    workload: str
    norm: str
    optimizer: str
    precision: str
    seed: int
    effective_batch: int
    accumulation_steps: int
    micro_batch: int  # samples of the largest micro-batch of a full window
    arm: str
    algebra_error: float
    rounding_ratio: float
    scale: float
    cosine: float
    residual: float
    counters_ok: bool
    trajectory_ratio: float
    verdict: str
    cause: str
    explained: bool

    @classmethod
    def of(cls, config: TrialConfig, arm: ArmName, micro_batch: int, evidence: Evidence, verdict: Verdict) -> Self:
        """The row of an arm of the trial `config`, judged from `evidence`."""
        return cls(
            experiment=config.experiment,
            trial=identity(config),
            workload=config.workload.label,
            norm=str(config.norm),
            optimizer=config.optimizer.label,
            precision=str(config.precision),
            seed=config.seed,
            effective_batch=config.effective_batch,
            accumulation_steps=arm.accumulation_steps,
            micro_batch=micro_batch,
            arm=arm.name,
            algebra_error=evidence.algebra.error,
            rounding_ratio=evidence.rounding.ratio,
            scale=evidence.rounding.scale,
            cosine=evidence.rounding.cosine,
            residual=evidence.rounding.residual,
            counters_ok=not evidence.counters,
            trajectory_ratio=evidence.trajectory.ratio,
            verdict=str(verdict.verdict),
            cause=verdict.cause,
            explained=verdict.explained,
        )


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Where the training of an arm ended; losses per loss term, in nats."""

    final_loss: float  # of the last window
    tail_loss: float  # mean over the last tenth of the windows
    held_out_loss: float
    held_out_accuracy: float


_VERDICTS, _PRECISIONS = (tuple(map(str, kind)) for kind in (Outcome, Precision))
VERDICT_COLUMNS = tuple(field.name for field in dataclasses.fields(VerdictRow))
OUTCOMES = tuple(field.name for field in dataclasses.fields(Ending))


def to_stored(row: VerdictRow, reasons: Sequence[str], evidence: Evidence, ending: Ending) -> dict[str, Any]:
    """The arm in plain JSON types: the columns of its row, `reasons`, `evidence` and `outcome`."""
    beside = {"reasons": list(reasons), "evidence": evidence.stored(), "outcome": vars(ending)}
    return {**vars(row), **beside}


@dataclass(frozen=True, kw_only=True)
class StoredArm:
    """An arm that was read back, as far as tables and figures use it."""

    row: VerdictRow
    reasons: Sequence[str]
    algebra: Algebra
    rounding: Rounding
    trajectory: Trajectory
    counters: tuple[str, ...]  # names of those that differ from the full batch's
    explanations: Mapping[str, float]  # cause -> largest error of its oracle over the wrong windows
    ending: Ending

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Self:
        """The arm that `to_stored` wrote; FieldError where its fields are others."""
        reasons, evidence, ending = members(stored, "arm", ("reasons", "evidence", "outcome"))
        algebra, rounding, trajectory, counters, signature = members(
            evidence, "evidence", ("algebra", "rounding", "trajectory", "counters", "signature")
        )
        [explanations] = members(signature, "evidence.signature", ("explanations",))
        columns = dict(stored)
        for name in ("reasons", "evidence", "outcome"):
            del columns[name]
        row = restored(VerdictRow, columns, "arm")
        for name, value, known in (("verdict", row.verdict, _VERDICTS), ("precision", row.precision, _PRECISIONS)):
            if value not in known:
                raise FieldError(f"arm: {name}={value}, expected one of {', '.join(known)}")
        return cls(
            row=row,
            reasons=[str(reason) for reason in reasons],
            algebra=restored(Algebra, algebra, "evidence.algebra"),
            rounding=restored(Rounding, rounding, "evidence.rounding"),
            trajectory=restored(Trajectory, trajectory, "evidence.trajectory"),
            counters=tuple(sorted(counters)),
            explanations=explanations,
            ending=restored(Ending, ending, "outcome"),
        )


def members(stored: Mapping[str, Any], where: str, names: Sequence[str]) -> list[Any]:
    """The members `names` of the record `where`, in that order; FieldError names those that are not there."""
    try:
        return [stored[name] for name in names]
    except KeyError:
        raise FieldError(f"{where}: missing {', '.join(name for name in names if name not in stored)}") from None


def restored(kind: type[Fields], stored: Mapping[str, Any], where: str) -> Fields:
    """The dataclass `kind` from the record `where`. FieldError unless it has its fields; one with a default may be absent."""
    fields = kind.__dataclass_fields__
    if stored.keys() != fields.keys():
        defaults = {name: field.default for name, field in fields.items() if field.default is not dataclasses.MISSING}
        missing, unknown = fields.keys() - stored.keys() - defaults.keys(), stored.keys() - fields.keys()
        told = [f"{word} {', '.join(sorted(names))}" for word, names in (("missing", missing), ("unknown", unknown)) if names]
        if told:
            raise FieldError(f"{where}: {' and '.join(told)}")
        stored = {**defaults, **stored}
    kinds = tuple(map(type, map(stored.__getitem__, fields)))
    if kinds not in _seen(kind):
        for name, found, admitted in zip(fields, kinds, _admitted(kind), strict=True):
            if not any(found is one or (found is not bool and issubclass(found, one)) for one in admitted):
                raise FieldError(f"{where}: {name}={stored[name]!r}, expected {admitted[0].__name__}")
        _seen(kind).add(kinds)
    made = object.__new__(kind)
    vars(made).update(stored)  # a frozen dataclass's own __init__ takes five times as long, which a store of 10,000 trials shows
    return made


@cache
def _admitted(kind: type[DataclassInstance]) -> list[tuple[type, ...]]:
    """What each field may be in JSON, in the order of the fields."""
    hints = get_type_hints(kind)
    unions = [get_args(hint) if isinstance(hint, UnionType) else (hint,) for hint in map(hints.get, kind.__dataclass_fields__)]
    return [tuple(one for part in union for one in _STORED[get_origin(part) or part]) for union in unions]


@cache
def _seen(kind: type[DataclassInstance]) -> set[tuple[type, ...]]:
    """The types of the fields of records that passed: nearly all records of a store have the same."""
    return set()
