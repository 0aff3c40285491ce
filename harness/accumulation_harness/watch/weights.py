"""Rung 1: do all loss terms of a window weigh alike, and together one?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accumulation_harness.judge.cause import Cause
from accumulation_harness.watch.evidence import Finding, Remark, Rung, Window
from accumulation_harness.watch.gradients import Sum
from accumulation_harness.watch.slopes import Loss, Slope

COMPLETE = 1e-3  # of the loss, which the recognised terms must add up to
TOLERANCE = 1e-3  # of a weight; or four residuals of the fit, where these are larger


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of one window's loss terms."""

    window: int
    num: int  # micro-batches
    terms: tuple[float, ...]  # of each
    positions: tuple[int, ...]
    rows: tuple[int, ...]
    each: tuple[float, ...]  # weight of one term of each micro-batch in the gradient at the step
    total: float  # terms of the window, over all ranks
    own: float  # of this rank
    world: int
    heads: int
    kind: Loss
    tolerance: float
    why_incomplete: Remark | None = None  # what of the loss these weights do not cover

    @property
    def shares(self) -> tuple[float, ...]:
        """What each term weighs of what it should: 1 everywhere."""
        return tuple(c * self.total for c in self.each)

    @property
    def equal(self) -> bool:
        """Whether all terms weigh alike."""
        return alike(self.each, self.tolerance)


def weights_of(window: Window, summed: Sum) -> tuple[Weights | None, Remark | None]:
    """The weights, or why they are not known."""
    looked = [m.slopes for m in window.micro_batches]
    if any(slopes is None for slopes in looked):
        return None, None
    heads = [[slope for slope in slopes or () if slope.terms] for slopes in looked]
    if not any(slopes for slopes in looked):
        return None, Remark.logits_unseen
    full = [slopes for slopes in heads if slopes]
    if len({len(slopes) for slopes in full}) != 1:
        return None, Remark.unequal_outputs
    if any(slope.kind is None for slopes in full for slope in slopes):
        ragged = any(slope.ragged for slopes in full for slope in slopes)
        return None, Remark.ragged if ragged else Remark.unknown_loss
    firsts = [slopes[0] for slopes in full]
    kind = firsts[0].kind
    if kind is None or any(slope.kind is not kind for slope in firsts):
        return None, Remark.unlike_forms
    own = sum(slope.terms for slope in firsts)
    ranks = window.ranks
    total, world = (sum(ranks.terms), len(ranks.terms)) if ranks is not None and all(ranks.terms) else (own, 1)
    scales = [m.scale for m, slopes in zip(window.micro_batches, heads, strict=True) if slopes]
    factor = summed.factor if ranks is None or not ranks.sharded else 1 / world
    worst = max(slope.residual for slope in firsts)
    return Weights(
        window=window.index,
        num=len(looked),
        terms=tuple(slope.terms for slope in firsts),
        positions=tuple(slope.positions for slope in firsts),
        rows=tuple(slope.rows for slope in firsts),
        each=tuple(slope.weight * factor / scale for slope, scale in zip(firsts, scales, strict=True)),
        total=total,
        own=own,
        world=world,
        heads=len(full[0]),
        kind=kind,
        tolerance=max(TOLERANCE, 4 * worst),
        why_incomplete=_incomplete(window, heads, worst),
    ), None


def _incomplete(window: Window, heads: Sequence[Sequence[Slope]], worst: float) -> Remark | None:
    """Whether the losses that were recognised add up to what was differentiated, and hang on their own row alone."""
    if all(slope.diagonal for slopes in heads for slope in slopes):
        return Remark.diagonal
    for m, slopes in zip(window.micro_batches, heads, strict=True):
        known = sum(slope.weight * slope.value for slope in slopes) / m.scale
        if not abs(known - m.loss) <= max(COMPLETE, 4 * worst) * max(abs(known), abs(m.loss)):
            return Remark.another_term
    return None


def judged(weights: Weights, usual: int, *, resumed: bool, scaled: bool) -> list[Finding]:
    """What is wrong with the weights of a window, in a run whose windows have `usual` micro-batches.

    `scaled`: the gradient was multiplied before the step, by a factor that is in the weights; only unequal ones are named then.
    """
    tolerance, m = weights.tolerance, weights.num
    parts = [c * n for c, n in zip(weights.each, weights.terms, strict=True)]  # what each micro-batch weighs
    single = weights.heads == 1 and not scaled and weights.why_incomplete is not Remark.another_term
    if weights.equal:
        return _of_total(weights, weights.shares[0], usual, resumed=resumed) if single else []
    if alike(parts, tolerance) and not alike(weights.terms, tolerance):
        found = [_finding(Cause.mean_of_means, weights, "every micro-batch weighs the same whatever its number of loss terms")]
        factor = sum(parts) / m if weights.world == 1 else float("nan")
        if single and m > 1 and near(factor, 1, tolerance):
            found.insert(0, _finding(Cause.loss_not_divided, weights, f"the means of {m} micro-batches are added"))
        elif single and m < usual and near(factor, 1 / usual, tolerance):
            found.insert(0, _short(weights, usual, resumed=resumed))
        elif single and m > 2 and near(factor, 1 / m**2, tolerance):
            found.insert(0, _finding(Cause.loss_divided_twice, weights, f"micro-batches weigh 1/{m**2} each"))
        return found
    padded = [c * p for c, p in zip(weights.each, weights.positions, strict=True)]
    if alike(padded, tolerance) and not alike(weights.positions, tolerance):
        return [_finding(Cause.mean_of_means, weights, "every micro-batch is divided by its own positions, padding included")]
    by_rows = [share / rows for share, rows in zip(parts, weights.rows, strict=True)]
    if alike(by_rows, tolerance):
        return [_finding(Cause.mean_of_means, weights, "micro-batches weigh by their rows, whatever their number of loss terms")]
    return []


def _of_total(weights: Weights, share: float, usual: int, *, resumed: bool) -> list[Finding]:
    """All terms of this rank weigh alike: together one?"""
    tolerance, m = weights.tolerance, weights.num
    if near(share, 1, tolerance):
        return []
    if weights.world > 1:
        return _of_ranks(weights, share)
    if m < usual and near(share, m / usual, tolerance):
        return [_short(weights, usual, resumed=resumed)]
    if m > 1 and near(share, m, tolerance):
        return [
            _finding(Cause.loss_not_divided, weights, f"the loss terms of a window weigh {share:.4g}, with {m} micro-batches")
        ]
    if m > 1 and near(share, 1 / m, tolerance):
        return [
            _finding(Cause.loss_divided_twice, weights, f"the loss terms of a window weigh {share:.4g}, with {m} micro-batches")
        ]
    counted = sum(weights.positions)
    if not alike(weights.positions, tolerance) and near(share * counted / weights.total, 1, tolerance):
        return [
            _finding(Cause.counter_wrong, weights, f"the loss is divided by {counted} positions, {weights.total:g} of them count")
        ]
    return []


def _of_ranks(weights: Weights, share: float) -> list[Finding]:
    tolerance, world, m = weights.tolerance, weights.world, weights.num
    uneven = weights.total / (world * weights.own)
    if near(share, uneven, tolerance):
        return [_finding(Cause.mean_of_means, weights, "ranks are averaged although their numbers of loss terms differ")]
    for factor, cause in ((m, Cause.loss_not_divided), (1 / m, Cause.loss_divided_twice)):
        if m > 1 and (near(share, factor, tolerance) or near(share, factor * uneven, tolerance)):
            return [_finding(cause, weights, f"the loss terms of a window weigh {share:.4g}, with {m} micro-batches")]
    if near(share, world, tolerance) or near(share, 1 / world, tolerance):
        return [_finding(Cause.replica_scale, weights, f"the loss terms of all {world} ranks weigh {share:.4g}")]
    return []


def _short(weights: Weights, usual: int, *, resumed: bool) -> Finding:
    cause = Cause.resume_in_window if resumed else Cause.short_window_divided_by_n
    return _finding(cause, weights, f"a window of {weights.num} micro-batches is divided by {usual}")


def _finding(cause: Cause, weights: Weights, message: str) -> Finding:
    evidence = {
        "loss": weights.kind,
        "loss terms": [round(n, 3) for n in weights.terms[:16]],
        "weight of a term, of what it should be": [float(f"{share:.4g}") for share in weights.shares[:16]],
    }
    return Finding(cause=cause, message=message, window=weights.window, rung=Rung.ledger, evidence=evidence)


def alike(numbers: Sequence[float], tolerance: float) -> bool:
    """Whether they are one number."""
    largest = max(map(abs, numbers))
    return max(numbers) - min(numbers) <= tolerance * largest


def near(number: float, wanted: float, tolerance: float) -> bool:
    """Whether it is that number."""
    return abs(number - wanted) <= tolerance * abs(wanted)
