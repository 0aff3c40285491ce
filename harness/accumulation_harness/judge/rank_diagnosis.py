"""From what replicas that stepped together consumed to the name of what was wrong with it. Plain numbers; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accumulation_harness.judge.cause import MEANINGS, Cause, Causes, joined
from accumulation_harness.judge.gates import ALGEBRA_GATE


@dataclass(frozen=True)
class Variant:
    """One form of a cause on several ranks, and the sentence that reports it."""

    cause: Cause
    sentence: str


SUMMED = Variant(Cause.replica_scale, "gradients were summed over the ranks where they should be averaged")
AVERAGED_TWICE = Variant(Cause.replica_scale, "gradients were divided by the number of ranks once too often")
MEAN_OF_MEANS = Variant(
    Cause.replica_scale, "means over each rank's own loss terms were averaged, and the ranks have unequal numbers"
)
SUM_OF_MEANS = Variant(Cause.replica_scale, "means over each rank's own loss terms were summed")
NEVER = Variant(Cause.replicas_not_synchronised, "each rank stepped on its own share of the window alone")
PARTLY = Variant(Cause.replicas_not_synchronised, "the ranks exchanged only the first part of the window")
NOT_DIVIDED = Variant(Cause.loss_not_divided, MEANINGS[Cause.loss_not_divided].sentence)
DIVIDED_TWICE = Variant(Cause.loss_divided_twice, MEANINGS[Cause.loss_divided_twice].sentence)


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """One window on W ranks: the gradient a_r that the optimizer of each rank received, and the reference gradient g."""

    accumulation_steps: int
    terms: tuple[float, ...]  # loss terms of each rank
    distance: float  # the largest ||a_r - g|| / ||g||; scale and cosine are that rank's
    scale: float
    cosine: float
    weights: tuple[tuple[float, ...], ...]  # of each a_r on the ranks' rightful contributions: all 1 when right
    residual: float  # largest ||part of a_r outside their span|| / ||a_r||
    condition: float  # of the contributions at unit length
    rank_distance: float  # largest ||a_r - a_0|| / ||a_0||
    parameter_distance: float  # the same for the parameters after the step
    explanations: Mapping[Variant, float]  # the largest error over the ranks, of its best hypothesis

    @property
    def is_right(self) -> bool:
        """Whether every rank took the window's step."""
        return all(error <= ALGEBRA_GATE for error in (self.distance, self.rank_distance, self.parameter_distance))


@dataclass(frozen=True)
class RankDiagnosis:
    """What was wrong with a window's step on several ranks."""

    causes: Causes  # empty when the window's step was taken
    sentence: str

    @property
    def cause(self) -> str:
        """As in the tables: several causes joined by `+`."""
        return joined(self.causes)


def diagnose_ranks(evidence: RankEvidence) -> RankDiagnosis:
    """Name the cause of a wrong step on several ranks.

    Args:
        evidence: What one window shows.

    Returns:
        The cause whose simulation reproduces the gradients of all ranks; `unexplained` if none or more than one does; no cause
        if the step is right.
    """
    if evidence.is_right:
        return RankDiagnosis((), "every rank took the window's step")
    seen = (
        f"off by {evidence.distance:.3g} (scale {evidence.scale:.4g}, cosine {evidence.cosine:.4g}), "
        f"ranks {evidence.rank_distance:.3g} apart"
    )
    fits = [variant for variant, error in evidence.explanations.items() if error <= ALGEBRA_GATE]
    causes = sorted({variant.cause for variant in fits})
    if len(causes) == 1:
        return RankDiagnosis((causes[0],), f"{fits[0].sentence}: {seen}")
    if causes:
        told = f"{seen}: {' and '.join(causes)} explain it equally well; try another number of micro-batches"
        return RankDiagnosis((Cause.unexplained,), told)
    # That ranks step apart is seen, not inferred; why they do is not known.
    apart = evidence.rank_distance > ALGEBRA_GATE or evidence.parameter_distance > ALGEBRA_GATE
    return RankDiagnosis((*[Cause.replicas_not_synchronised] * apart, Cause.unexplained), seen)
