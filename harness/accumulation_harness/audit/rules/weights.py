"""Rules about weights: of the micro-batches (or of ranks) in the reference gradient, and in the one that the step took."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.compare.sums import SAME_NORM, giving
from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.rules.finding import (
    UNEQUAL,
    at,
    equal,
    known_weights,
    listed,
    made_of,
    other_factors,
    same_factor,
)
from accumulation_harness.judge.cause import Cause

FEWEST_RATIOS = 3  # of neighbouring weights, below which they fall evenly by chance
SAME_RATIO = 1e-3  # relative; ratios of neighbouring weights that differ by less are one


def unequal_replicas(facts: StepFacts) -> Iterator[Finding]:
    """Find ranks that are not weighted as the reference gradient weighs them.

    Args:
        facts: What was measured of one pair of steps.

    Yields:
        At most one finding.
    """
    seen, flat, ranks = facts.by_rank, facts.by_rank.weights, facts.ranks
    if not made_of(facts, seen) or min(flat) <= 0:
        return
    columns = [flat[rank::ranks] for rank in range(ranks)]
    means = tuple(sum(column) / len(column) for column in columns)
    evidence = {"right_weights": list(zip(*columns, strict=True)), "condition": seen.condition}
    if not equal(means):
        message = f"ranks count equally although they hold unequal numbers of loss terms; right weights: {listed(means)}"
        yield at(facts, Cause.replica_scale, "predicted", message, **evidence)
    if max(max(column) - min(column) for column in columns) > UNEQUAL * max(flat):
        message = "the micro-batches of a rank count equally although they hold unequal numbers of loss terms"
        yield at(facts, Cause.mean_of_means, "predicted", message, **evidence)


def weighted(facts: StepFacts) -> list[Finding]:
    """The reference gradient is a sum of the contributions with other weights: the micro-batches themselves are right.

    Args:
        facts: What was measured of one pair of steps.

    Returns:
        The findings; empty where the weights explain nothing.
    """
    if facts.line <= facts.gate:
        return []  # a multiple of the right gradient: no micro-batch counts otherwise than another
    if not known_weights(facts, facts.parts) or not facts.sum_line <= facts.gate:
        return []
    if other_factors(facts) or max(facts.parts.weights) - min(facts.parts.weights) <= facts.parts.rounding:
        return []  # rows of one micro-batch count otherwise than each other; or the weights are equal, as far as they are known
    if one := _one_backward(facts) or _growing(facts) or _counted_so_far(facts):
        return [one]
    return own_means(facts)


def not_of_the_loss(facts: StepFacts) -> Iterator[Finding]:
    """Backwards that count in the step although their right weight is 0: of another loss, or from before the window.

    Args:
        facts: What was measured of one pair of steps.

    Yields:
        At most one finding.
    """
    parts, foreign, k = facts.parts, facts.not_of_the_loss, len(facts.parts.weights)
    right = tuple(0.0 if place in foreign else 1.0 if parts.free else w for place, w in enumerate(parts.weights))
    own = tuple(w for place, w in enumerate(right) if place not in foreign)
    if not foreign or min(own) < 0:
        return
    cause, message = Cause.foreign_gradients, "add gradients of another loss, which are cleared at N=1"
    if foreign[-1] < k - len(own):
        cause, message = Cause.gradients_not_cleared, "come before the window, and their gradients are still there"
    message = f"{len(foreign)} of {k} backwards {message}; right weights: {listed(right)}"
    yield at(facts, cause, "predicted", message, right_weights=right)
    mean, n = sum(own) / len(own), facts.accumulation_steps
    if not equal(own):
        yield from own_means(facts.but(parts=parts._replace(weights=own), backwards=len(own)))
    elif abs(mean - 1) > UNEQUAL and abs(mean * n - 1) <= UNEQUAL:
        message = f"besides, each of the others counts {n} times: their losses are added, not averaged"
        yield at(facts, Cause.loss_not_divided, "predicted", message)


def means_of_some(facts: StepFacts) -> list[Finding]:
    """Micro-batches without any loss term have their share of the mean, and the others hold equal numbers of terms.

    Args:
        facts: What was measured of one pair of steps.

    Returns:
        At most one finding.
    """
    k, without = facts.backwards, facts.without_terms
    if not 0 < without < k or not facts.line <= facts.gate:
        return []
    of_mean = facts.raw.scale * k / (k - without)
    for cause, times in ((None, 1), (Cause.loss_not_divided, facts.accumulation_steps)):
        if abs(of_mean / times - 1) <= same_factor(facts):
            return _mean_of_means(facts, (cause, 1 / times))
    return []


def own_means(facts: StepFacts) -> list[Finding]:
    """Ask whether every micro-batch is averaged over its own loss terms.

    Micro-batch k holds n_k of the window's n terms, and its mean counts with the share s_k in the sum: w_k = (n_k / n) / s_k,
    so that w_k s_k adds up to 1 (or to a fault).

    Args:
        facts: The step.

    Returns:
        The finding, and what is wrong besides; none where it is not so.
    """
    shares = [len(b.rows or ()) / w for b, w in zip(giving(facts.mine), facts.parts.weights, strict=False) if w > 0]
    if facts.probe.coupled and facts.probe.of_all and not (all(shares) and equal(tuple(shares))):
        return []  # else each counts by its rows, which is nothing that another row has a part in
    if found := _own_means(facts):
        return found
    parts = facts.parts
    added = facts.but(parts=parts._replace(weights=tuple(w * facts.as_added for w in parts.weights)))
    # Of a sum that was shortened nobody knows by what else it was divided.
    return [one for one in _own_means(added) if one.cause not in (Cause.loss_not_divided, Cause.loss_divided_twice)]


def _own_means(facts: StepFacts) -> list[Finding]:
    weights, k, n = facts.parts.weights, facts.backwards, facts.accumulation_steps
    losses = len(facts.theirs.backwards)
    losses = losses if losses and len(weights) % losses == 0 and len(weights) > losses else 1  # each with backwards of its own
    known = min(UNEQUAL, max(facts.gate * facts.parts.condition, facts.parts.rounding))
    factors: list[tuple[Cause | None, float]] = [(None, 1.0)]
    factors += [(Cause.short_window_divided_by_n, n * losses / k)] if k < n * losses else []
    for count in dict.fromkeys((float(n), k / losses)) if n > 1 else ():  # a short window's means are added as well
        factors += [(Cause.loss_not_divided, 1 / count), (Cause.loss_divided_twice, count)]
    for shares in _shares(facts):
        counted = [w * share * losses for w, share in zip(weights, shares, strict=True)]
        sums = [sum(counted[place::losses]) for place in range(losses)]
        found = [next(((cause, mean) for cause, f in factors if abs(mean / f - 1) <= known), None) for mean in sums]
        if facts.without_terms and _part_of_one(sums[0], facts):
            found[0] = found[0] or (None, sums[0])
        if all(found):
            return _mean_of_means(facts, found[0] if losses == 1 else None)
    return []


def _part_of_one(mean: float, facts: StepFacts) -> bool:
    """Whether 1 is missed by what micro-batches without a gradient may have held: such a one may have loss terms all the same."""
    return 0 < 1 - mean <= 2 * facts.without_terms / facts.backwards


def _mean_of_means(facts: StepFacts, besides: tuple[Cause | None, float] | None) -> list[Finding]:
    """`besides`: what the mean weight says of the whole, and that mean."""
    message = "micro-batches count equally although they hold unequal numbers (or weights) of loss terms"
    if facts.without_terms:
        message += f", {facts.without_terms} of them none"
    found = [at(facts, Cause.mean_of_means, "predicted", f"{message}; right weights: {listed(facts.parts.weights)}")]
    cause, mean = besides or (None, 1.0)
    if cause is not None:
        message = f"besides, the gradient as a whole is {1 / mean:.4g} times what it should be"
        found.append(at(facts, cause, "predicted", message, factor=1 / mean))
    return found


def _shares(facts: StepFacts) -> list[tuple[float, ...]]:
    """What each micro-batch may have been given of the window: equal shares, or by its rows."""
    rows, count = [len(b.rows or ()) for b in giving(facts.mine)], len(facts.parts.weights)
    by_rows = [tuple(each / facts.mine.num_rows for each in rows)] if len(rows) == count and all(rows) else []
    return [(1 / facts.backwards,) * count, *by_rows]


def _one_backward(facts: StepFacts) -> Finding | None:
    """Several backwards per micro-batch, one for each loss: all of one loss count otherwise than those of another."""
    losses, weights = len(facts.theirs.backwards), facts.parts.weights
    if losses < 2 or len(weights) % losses or len(weights) == losses:
        return None
    by_loss = [weights[place::losses] for place in range(losses)]
    means = tuple(sum(same) / len(same) for same in by_loss)
    if not all(equal(same) for same in by_loss) or equal(means):
        return None
    message = (
        f"the losses of a micro-batch, each with a backward of its own, are not divided alike; right weights: {listed(means)}"
    )
    return at(facts, Cause.auxiliary_loss_scale, "predicted", message, right_weights_of_losses=means)


def growth(weights: tuple[float, ...]) -> float | None:
    """Find the factor by which each micro-batch counts more (or less) than the one before.

    Numbers of loss terms do not do that.

    Args:
        weights: The right weight w_k of each micro-batch, by which what it gave is to be multiplied.

    Returns:
        The factor w_k / w_(k+1), the same for all k; None where it is not one, where the weights are equal, or too few to
        tell.
    """
    ratios = tuple(a / b for a, b in pairwise(weights))
    if len(ratios) < FEWEST_RATIOS or max(ratios) - min(ratios) > SAME_RATIO * max(ratios) or abs(ratios[0] - 1) <= UNEQUAL:
        return None
    return ratios[0]


def _growing(facts: StepFacts) -> Finding | None:
    factor = growth(facts.parts.weights)
    if factor is None:
        return None
    message = f"every micro-batch counts {factor:.4g} times the one before: its loss is scaled by a factor that changes inside"
    return at(facts, Cause.scaler_updated_in_window, "predicted", message, factor=factor)


def _counted_so_far(facts: StepFacts) -> Finding | None:
    right = facts.parts.weights
    if len(right) <= FEWEST_RATIOS or not equal(tuple(weight / k for k, weight in enumerate(right, start=1))):
        return None
    message = (
        f"micro-batch k is divided by k, how many there were so far, and not by their number; right weights: {listed(right)}"
    )
    return at(facts, Cause.counter_wrong, "predicted", message)


def sum_rescaled(facts: StepFacts) -> Iterator[Finding]:
    """Gradients are scaled between backwards, as was seen or as weights tell: each scaling weighs all micro-batches before it.

    Args:
        facts: What was measured of one pair of steps.

    Yields:
        At most one finding.
    """
    weights = facts.taken.weights
    sizes = facts.taken._replace(weights=tuple(map(abs, weights)))  # a sum may be reversed, again and again
    if not known_weights(facts, sizes) or facts.own_sum <= facts.gate:
        return
    ratios = [b / a for a, b in pairwise(weights) if not equal((a, b))]
    if (
        (facts.norms_inside or (len(ratios) > 1 and min(facts.sums, facts.sums_line) <= facts.gate))
        and ratios
        and equal(tuple(map(abs, ratios)))
        and min(ratios) * max(ratios) >= 0
    ):
        of_last = listed(tuple(weight / weights[-1] for weight in weights))
        message = f"the sum so far is divided by {ratios[0]:.4g} again and again: micro-batches count {of_last} of the last one"
        yield at(facts, Cause.sum_rescaled_in_window, "predicted", message, weights=weights, ratio=ratios[0])


def _to_one_norm(facts: StepFacts) -> bool:
    """Whether the longest of what micro-batches gave, two at least, have one norm, and others count equally and by no more."""
    parts = facts.parts
    long = [size >= max(parts.sizes) * (1 - SAME_NORM) for size in parts.sizes]
    short = [w for w, is_long in zip(parts.weights, long, strict=True) if not is_long]
    known = facts.own_sum <= facts.gate and made_of(facts, parts) and parts.told_apart and sum(long) > 1
    return known and (not short or (equal((*short,)) and max(short) <= min(parts.weights) * (1 + UNEQUAL)))


def clipped_aside(facts: StepFacts) -> Iterator[Finding]:
    """Gradients are made smaller inside the window, element by element or each part before it is added elsewhere.

    Args:
        facts: What was measured of one pair of steps.

    Yields:
        At most one finding.
    """
    taken, message = facts.taken, ""
    adds_up = min(facts.scaled_sum, facts.sums, facts.sums_line) <= facts.gate and facts.backwards > 1
    if facts.shrunk_by_size:
        message = (
            f"gradients are made smaller {facts.shrunk} times in the window, the larger ones by more; the sum is right without"
        )
    elif facts.line > facts.gate and _to_one_norm(facts):
        message = f"the largest of what the micro-batches give have one norm, {max(facts.parts.sizes):.4g}: each was clipped"
    elif not adds_up or facts.own_sum <= facts.gate or facts.line <= facts.gate:
        return  # nothing is clipped, or nothing that is not at N=1 as well: rows are
    elif facts.clipped_parts <= facts.gate:
        message = "each micro-batch's gradient is clipped or scaled to one norm before it is added; unclipped, the sum is right"
    elif facts.clips_sums:
        message = "the sum so far is clipped to one norm after each micro-batch; unclipped, it is right"
    elif facts.clamped_parts <= facts.gate:
        message = "each micro-batch's gradient is clipped by value before it is added; unclipped, the sum is right"
    if message:
        yield at(facts, Cause.clip_per_micro_batch, "predicted", message, weights=taken.weights, norms=taken.sizes)
