"""A judged arm in `trial.json`: the one definition of its columns, which `trial` writes and `analysis.load` reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from accumulation_harness.config import TrialConfig
from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.config.identity import identity
from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.verdict import Evidence, Verdict


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """The columns of `verdicts.csv`, in their order; `Algebra`, `Rounding` and `Trajectory` explain the measures."""

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
            workload=_with_arguments(config.workload.label, config.workload.args),
            norm=str(config.norm),
            optimizer=_with_arguments(config.optimizer.label, config.optimizer.args),
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


def _with_arguments(label: str, arguments: Mapping[str, Any]) -> str:
    """A name as tables have it: `Task(width=8)` of what is made with arguments, which may be swept."""
    return f"{label}({', '.join(f'{name}={value}' for name, value in arguments.items())})" if arguments else label


@dataclass(frozen=True, kw_only=True)
class EvidenceRow:
    """The evidence of one arm that tables and figures use; NaN where there is no such number."""

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
    parted_at: float  # window
    rounding_high: float
    rounding_windows: int
    full_error: float
    arm_error: float
    permutations: int
    skipped: int
    final_distance: float
    jump_step: float
    oracle_error: float  # of the windows that are wrong, to what the model's BatchNorm explains
    counters: str  # names of those that differ from the full batch's

    @classmethod
    def of(cls, evidence: Evidence) -> Self:
        """What the columns say of the arm that was judged from `evidence`."""
        algebra, rounding, trajectory = evidence.algebra, evidence.rounding, evidence.trajectory
        known = vars(trajectory) | vars(rounding) | vars(algebra)
        known |= {"algebra_steps": algebra.steps, "algebra_floor": algebra.floor}
        known |= {"rounding_high": rounding.high, "rounding_windows": rounding.windows}
        known |= {name: math.nan for name in ("parted_at", "jump_step") if known[name] is None}
        known["oracle_error"] = evidence.signature.explanations.get((Cause.batch_statistics,), math.nan)
        known["counters"] = ", ".join(sorted(evidence.counters))
        return cls(**{name: known[name] for name in EVIDENCE_COLUMNS})


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Where the training of an arm ended; losses are per loss term, in nats."""

    final_loss: float  # of the last window
    tail_loss: float  # mean over the last tenth of the windows
    held_out_loss: float
    held_out_accuracy: float


VERDICT_COLUMNS, EVIDENCE_COLUMNS, OUTCOMES = (
    tuple(field.name for field in dataclasses.fields(kind)) for kind in (VerdictRow, EvidenceRow, Ending)
)


def to_stored(row: VerdictRow, reasons: Sequence[str], evidence: Evidence, ending: Ending) -> dict[str, Any]:
    """Return an arm as it is stored, in plain JSON types.

    Args:
        row: The columns of `verdicts.csv`.
        reasons: The reasons of the verdict.
        evidence: Everything that was measured of the arm.
        ending: Where its training ended.

    Returns:
        All columns by name, and `evidence` as a mapping.
    """
    columns = {**vars(row), **vars(EvidenceRow.of(evidence)), **vars(ending)}
    return {**columns, "reasons": "; ".join(reasons), "evidence": evidence.stored()}
