"""Replicas of a model that stepped together: what each consumed, beside the window's gradient and those of known faults.

As in `hypotheses.py`, each fault is its textbook description, evaluated on the referee's gradients of every rank's micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from accumulation_harness.judge.rank_diagnosis import (
    AVERAGED_TWICE,
    DIVIDED_TWICE,
    MEAN_OF_MEANS,
    NEVER,
    NOT_DIVIDED,
    PARTLY,
    SUM_OF_MEANS,
    SUMMED,
    RankEvidence,
    Variant,
)  # fmt: skip
from accumulation_harness.referee.gradients import compare, decompose, relative_distance
from accumulation_harness.referee.oracle import Parts, Referee, State, summed
from accumulation_harness.workloads import Batch

Hypothesis = tuple[Variant, list[Tensor]]  # (variant of a cause, gradient [P] of each rank)


def observe(
    referee: Referee,
    state: State,
    window: Batch,
    cuts: Sequence[Sequence[int]],
    consumed: Sequence[Tensor],
    after: Sequence[Tensor],
) -> RankEvidence:
    """Compare what several ranks did in a window with the exact gradient.

    Args:
        referee: Computes exact gradients.
        state: The values before the step, the same on all ranks.
        window: The window of all ranks.
        cuts: Samples of each rank's micro-batches.
        consumed: [P] the gradient that the optimizer of each rank received.
        after: [P] the parameters of each rank after the step.

    Returns:
        What the window shows.
    """
    right = referee.gradient(state, window)
    parts = referee.parts(state, window, [size for cut in cuts for size in cut])
    ranks = _by_rank(parts, [len(cut) for cut in cuts])
    comparisons = [compare(a, right) for a in consumed]
    worst = max(comparisons, key=lambda c: c.distance)
    taken_apart = [decompose(a, [rank.share for rank in ranks]) for a in consumed]
    return RankEvidence(
        accumulation_steps=len(cuts[0]),
        terms=tuple(rank.terms for rank in ranks),
        **vars(worst),
        weights=tuple(tuple(w / len(ranks) for w in one.weights) for one in taken_apart),
        residual=max(one.residual for one in taken_apart),
        condition=taken_apart[0].condition,
        rank_distance=max(relative_distance(a, consumed[0]) for a in consumed),
        parameter_distance=max(relative_distance(p, after[0]) for p in after),
        explanations=explanations(ranks, consumed),
    )


@dataclass(frozen=True)
class RankParts:
    """A rank's rightful contributions to the window's gradient, by micro-batch ([P] each), and its loss terms."""

    shares: tuple[Tensor, ...]
    terms: float

    @property
    def share(self) -> Tensor:
        """[P] the rank's rightful contribution."""
        return summed(self.shares)


def _by_rank(parts: Parts, lengths: Sequence[int]) -> list[RankParts]:
    """Deal micro-batches to ranks.

    Args:
        parts: The micro-batches of the window, rank after rank.
        lengths: Micro-batches of each rank.

    Returns:
        Contributions and loss terms of each rank.
    """
    shares, terms = iter(parts.shares), iter(parts.terms)
    return [RankParts(tuple(next(shares) for _ in range(num)), sum(next(terms) for _ in range(num))) for num in lengths]


def explanations(ranks: Sequence[RankParts], consumed: Sequence[Tensor]) -> dict[Variant, float]:
    """Compare what ranks consumed with every known fault.

    Args:
        ranks: Contributions and loss terms of each rank.
        consumed: [P] gradient of each rank.

    Returns:
        Variant of a fault -> the largest relative error over the ranks, of the best of its hypotheses.
    """
    errors: dict[Variant, float] = {}
    for variant, gradients in _hypotheses(ranks):
        error = max(relative_distance(a, h) for a, h in zip(consumed, gradients, strict=True))
        errors[variant] = min(errors.get(variant, math.inf), error)
    return errors


def _hypotheses(ranks: Sequence[RankParts]) -> Iterator[Hypothesis]:
    """Predict what ranks consume under each known fault, from S_r, rightful contributions, n_r, loss terms, and n, their sum.

    Args:
        ranks: Contributions and loss terms of each rank.

    Yields:
        A variant of a fault and [P] of each rank.
    """
    world, num, total = len(ranks), len(ranks[0].shares), sum(rank.terms for rank in ranks)
    right = summed(rank.share for rank in ranks)
    of_means = summed(rank.share * (total / rank.terms) for rank in ranks)
    on_all = {
        SUMMED: right * world,
        AVERAGED_TWICE: right / world,
        MEAN_OF_MEANS: of_means / world,
        SUM_OF_MEANS: of_means,
        # With as many micro-batches as ranks these are the first two, and nothing can tell them apart.
        NOT_DIVIDED: right * num,
        DIVIDED_TWICE: right / num,
    }
    yield from ((variant, [gradient] * world) for variant, gradient in on_all.items())
    for factors in ([total / rank.terms for rank in ranks], [float(world)] * world, [1.0] * world):  # own mean, scaled, a part
        yield NEVER, [f * rank.share for f, rank in zip(factors, ranks, strict=True)]
        for k in range(1, num):
            early = summed(f * summed(rank.shares[:k]) for f, rank in zip(factors, ranks, strict=True))
            late = [f * summed(rank.shares[k:]) for f, rank in zip(factors, ranks, strict=True)]
            yield PARTLY, [early + rest for rest in late]
            yield PARTLY, [early / world + rest for rest in late]
