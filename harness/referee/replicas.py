"""Replicas of a model that stepped together: whether they took the window's step, and if not, the name of what was wrong.

As in `causes.py`, each cause is its textbook description, evaluated on the referee's gradients of every rank's micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.judge.diagnosis import GATE, UNEXPLAINED
from harness.referee.gradients import compare, decompose, relative_distance
from harness.referee.oracle import Parts, Referee, State
from harness.workloads import Batch

SCALE, APART = "replica_scale", "replicas_not_synchronised"
SENTENCES = {
    f"{SCALE}#summed": "gradients were summed over the ranks where they should be averaged",
    f"{SCALE}#averaged_twice": "gradients were divided by the number of ranks once too often",
    f"{SCALE}#mean_of_means": "means over each rank's own loss terms were averaged, and the ranks have unequal numbers",
    f"{SCALE}#sum_of_means": "means over each rank's own loss terms were summed",
    f"{APART}#never": "each rank stepped on its own share of the window alone",
    f"{APART}#partly": "the ranks exchanged only the first part of the window",
    "loss_not_divided#all": "the loss is not divided by the number of micro-batches",
    "loss_divided_twice#all": "the loss is divided twice by the number of micro-batches",
}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One window: the gradients a_r that W ranks consumed, beside the referee's g of the whole window."""

    accumulation_steps: int
    terms: tuple[int, ...]  # loss terms of each rank
    distance: float  # the largest ||a_r - g|| / ||g||; scale and cosine are that rank's
    scale: float
    cosine: float
    weights: tuple[tuple[float, ...], ...]  # of each a_r on the ranks' rightful contributions: all 1 when right
    residual: float  # largest ||part of a_r outside their span|| / ||a_r||
    condition: float  # of the contributions at unit length
    rank_distance: float  # largest ||a_r - a_0|| / ||a_0||
    parameter_distance: float  # the same for the parameters after the step
    explanations: Mapping[str, float]  # hypothesis -> largest error over the ranks

    @property
    def is_right(self) -> bool:
        return self.distance <= GATE and self.rank_distance <= GATE and self.parameter_distance <= GATE


@dataclass(frozen=True)
class Finding:
    cause: str  # empty when the window's step was taken
    sentence: str


def observe(
    referee: Referee,
    state: State,
    window: Batch,
    cuts: Sequence[Sequence[int]],
    consumed: Sequence[Tensor],
    after: Sequence[Tensor],
) -> Evidence:
    """`cuts`: samples of each rank's micro-batches; `consumed`, `after`: each rank's gradient, and its parameters after the step.

    `state` is where all ranks were before it.
    """
    right = referee.gradient(state, window)
    parts = referee.parts(state, window, [size for cut in cuts for size in cut])
    ranks = by_rank(parts, [len(cut) for cut in cuts])
    comparisons = [compare(a, right) for a in consumed]
    worst = max(comparisons, key=lambda c: c.distance)
    taken_apart = [decompose(a, [rank.share for rank in ranks]) for a in consumed]
    return Evidence(
        accumulation_steps=len(cuts[0]),
        terms=tuple(rank.terms for rank in ranks),
        distance=worst.distance,
        scale=worst.scale,
        cosine=worst.cosine,
        weights=tuple(tuple(w / len(ranks) for w in one.weights) for one in taken_apart),
        residual=max(one.residual for one in taken_apart),
        condition=taken_apart[0].condition,
        rank_distance=max(relative_distance(a, consumed[0]) for a in consumed),
        parameter_distance=max(relative_distance(p, after[0]) for p in after),
        explanations={
            name: max(relative_distance(a, h) for a, h in zip(consumed, gradients, strict=True))
            for name, gradients in hypotheses(ranks)
        },
    )


@dataclass(frozen=True)
class RankParts:
    """A rank's rightful contributions to the window's gradient, by micro-batch ([P] each), and its loss terms."""

    shares: tuple[Tensor, ...]
    terms: int

    @property
    def share(self) -> Tensor:
        return torch.stack(self.shares).sum(0)


def by_rank(parts: Parts, lengths: Sequence[int]) -> list[RankParts]:
    """`lengths`: micro-batches of each rank."""
    shares, terms = iter(parts.shares), iter(parts.terms)
    return [RankParts(tuple(next(shares) for _ in range(num)), sum(next(terms) for _ in range(num))) for num in lengths]


def hypotheses(ranks: Sequence[RankParts]) -> Iterator[tuple[str, list[Tensor]]]:
    """(cause#variant, gradient of each rank) of every known fault. S_r: rightful contributions; n_r: loss terms, n their sum."""
    world, num, total = len(ranks), len(ranks[0].shares), sum(rank.terms for rank in ranks)
    right = torch.stack([rank.share for rank in ranks]).sum(0)
    of_means = torch.stack([rank.share * (total / rank.terms) for rank in ranks]).sum(0)
    on_all = {
        f"{SCALE}#summed": right * world,
        f"{SCALE}#averaged_twice": right / world,
        f"{SCALE}#mean_of_means": of_means / world,
        f"{SCALE}#sum_of_means": of_means,
        # With as many micro-batches as ranks these are the first two, and nothing can tell them apart.
        "loss_not_divided#all": right * num,
        "loss_divided_twice#all": right / num,
    }
    yield from ((name, [gradient] * world) for name, gradient in on_all.items())
    own = {"own": [total / rank.terms for rank in ranks], "scaled": [float(world)] * world, "window": [1.0] * world}
    for divisor, factors in own.items():
        yield f"{APART}#never#{divisor}", [f * rank.share for f, rank in zip(factors, ranks, strict=True)]
        for k in range(1, num):
            early = torch.stack([f * torch.stack(rank.shares[:k]).sum(0) for f, rank in zip(factors, ranks, strict=True)]).sum(0)
            late = [f * torch.stack(rank.shares[k:]).sum(0) for f, rank in zip(factors, ranks, strict=True)]
            yield f"{APART}#partly#{divisor}_summed_{k}", [early + rest for rest in late]
            yield f"{APART}#partly#{divisor}_averaged_{k}", [early / world + rest for rest in late]


def diagnose(evidence: Evidence) -> Finding:
    """The one cause that reproduces what every rank consumed; `unexplained` where there is none, or more than one."""
    if evidence.is_right:
        return Finding("", "every rank took the window's step")
    told = (
        f"off by {evidence.distance:.3g} (scale {evidence.scale:.4g}, cosine {evidence.cosine:.4g}), "
        f"ranks {evidence.rank_distance:.3g} apart"
    )
    fits = {name: SENTENCES["#".join(name.split("#")[:2])] for name, e in evidence.explanations.items() if e <= GATE}
    causes = {name.partition("#")[0] for name in fits}
    if len(causes) == 1:
        return Finding(causes.pop(), f"{next(iter(fits.values()))}: {told}")
    if causes:
        return Finding(
            UNEXPLAINED, f"{told}: {' and '.join(sorted(causes))} fit alike; another number of micro-batches would tell"
        )
    # That ranks step apart is seen, not inferred; why they do is not known.
    apart = evidence.rank_distance > GATE or evidence.parameter_distance > GATE
    return Finding(f"{APART}+{UNEXPLAINED}" if apart else UNEXPLAINED, told)
