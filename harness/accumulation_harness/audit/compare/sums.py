"""What the sum of a window's contributions says: which parts it has, what was cleared, clamped, rounded or lost in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from accumulation_harness.audit.compare.windows import slices
from accumulation_harness.audit.evidence import (
    FEW_ROUNDINGS,
    FEW_SEEN,
    FEWEST_ROUNDED,
    SHORT,
    Backward,
    Change,
    Step,
    Vector,
    emptied,
    of_few_digits,
    overflow_is_expected,
)
from accumulation_harness.compare.linear import WeightedSum, distance, dot, norm, off_line, weighted_sum

Format = Literal["bfloat16", "float16", "int8"]
AT_LIMIT = 1e-6  # relative; numbers that are nearer to each other are one
OTHER_FACTOR = 0.01  # relative; by which factors of gradients differ at least
MOST_LEVELS = 127  # of a whole number of 8 bits, beside its sign
ROUNDS = 12  # of Newton's method: a value is found in up to 9
MOST_PARTS = 64  # micro-batch gradients decomposed into
SAME_NORM = 1e-3  # relative; norms that differ by less are one


def giving(step: Step) -> list[Backward]:
    """The backwards that gave a finite gradient other than zero, where contributions were kept.

    Args:
        step: A recorded optimizer step.

    Returns:
        In their order.
    """
    return [b for b in step.backwards if b.contribution is not None and b.finite and b.contribution.any()]


def by_forward(backwards: Sequence[Backward], gate: float) -> list[Vector]:
    """What each gave; a second backward of one forward that gives a multiple of the first counts that one again.

    Args:
        backwards: Those of a window.
        gate: The relative distance within which two are multiples.

    Returns:
        [P] vectors, one for each forward.
    """
    parts: list[Vector] = []
    for b in backwards:
        if b.contribution is None:
            continue
        if parts and not b.forwards and off_line(b.contribution, parts[-1]) <= gate:
            parts[-1] = parts[-1] + b.contribution
        else:
            parts.append(b.contribution)
    return parts


def decomposed(g: Vector, parts: Sequence[Vector]) -> WeightedSum:
    """`g` as a sum of the parts; nothing is known of too many.

    Args:
        g: [P] gradient of the reference.
        parts: [P] vectors.

    Returns:
        Weights w with g = sum of w_k part_k, and the residual.
    """
    return weighted_sum(g, parts) if 0 < len(parts) <= MOST_PARTS else WeightedSum()


def by_rank(mine: Step, a: Vector, g: Vector, gate: float) -> WeightedSum:
    """Write a gradient as a sum of what every rank's micro-batches gave, before ranks were averaged.

    All weights are 1 where every rank and micro-batch counts as it does in the candidate, whose gradient is their sum divided
    by the number of ranks.

    Args:
        mine: The candidate's step.
        a: [P] its gradient.
        g: [P] the reference's gradient.
        gate: The relative distance that rounding explains.

    Returns:
        The weights, rank after rank, by micro-batch; empty where the candidate's own gradient is no such sum.
    """
    parts = [part / len(b.locals) for b in mine.backwards for part in b.locals]
    if not all(b.locals for b in mine.backwards) or not all(part.shape == g.shape and part.any() for part in parts):
        return WeightedSum()
    added = bool(parts) and off_line(a, np.asarray(np.sum(parts, axis=0))) <= gate  # not so where what the ranks gave was changed
    return decomposed(g, parts) if added else WeightedSum()


def emptied_at_last(mine: Step, a: Vector) -> tuple[str, ...]:
    """The tensors without a gradient at the step, although the window's backwards gave them one.

    Args:
        mine: The step with micro-batches.
        a: [P] gradient that the optimizer took.

    Returns:
        Their names.
    """
    if mine.total is None or mine.total.shape != a.shape:
        return ()
    return tuple(mine.tensors[place][0] for place in emptied(mine.total, a, mine.counts))


def since_clear(mine: Step, a: Vector) -> Vector:
    """What each tensor was given after its gradient was cleared for the last time.

    Args:
        mine: The step with micro-batches.
        a: [P] gradient that the optimizer took.

    Returns:
        [P] sum.
    """
    kept, parts = np.zeros_like(a), slices(mine)
    places = list(parts.values())
    for b in mine.backwards:
        for place in b.emptied:
            kept[places[place]] = 0
        kept = kept + b.contribution if b.contribution is not None else kept
    for name in emptied_at_last(mine, a):
        kept[parts[name]] = 0
    return kept


def clamped_parts(a: Vector, parts: Sequence[Vector]) -> float:
    """Compare with parts that are clamped by value, then added: straight lines in the value, so that Newton's method finds it.

    Args:
        a: [P] gradient that the optimizer took.
        parts: [P] what each micro-batch gave.

    Returns:
        Relative distance of `a` to the nearest such sum.
    """
    each, limit = np.stack(parts), np.abs(a).max() / len(parts)
    for _ in range(ROUNDS):
        slope = np.sum(np.sign(each) * (np.abs(each) > limit), axis=0)
        left = a - np.clip(each, -limit, limit).sum(axis=0)
        limit = max(0.0, limit + dot(slope, left) / max(1.0, dot(slope, slope)))
    return distance(a, np.clip(each, -limit, limit).sum(axis=0))


def clipped_parts(a: Vector, parts: Sequence[Vector]) -> float:
    """Compare with parts of which the longest, two at least, are brought to one norm before all are added.

    Args:
        a: [P] gradient that the optimizer took.
        parts: [P] what each micro-batch gave.

    Returns:
        Relative distance of `a` to the nearest multiple of such a sum.
    """
    known = sorted((norm(part), place) for place, part in enumerate(parts) if part.any())[::-1]
    least = math.inf
    for cut in range(2, len(known) + 1):
        long = np.sum([parts[place] / size for size, place in known[:cut]], axis=0)
        if cut == len(known):
            return min(least, off_line(a, long))
        found = weighted_sum(a, [np.sum([parts[place] for _, place in known[cut:]], axis=0), long])
        whole, limit = found.weights or (0.0, 0.0)
        if 0 < known[cut][0] * whole * (1 - SAME_NORM) <= limit <= known[cut - 1][0] * whole * (1 + SAME_NORM):
            least = min(least, found.residual)
    return least


def shrinking(changes: Sequence[Change]) -> tuple[int, bool]:
    """How many changes there are, if all make elements smaller; whether by unequal factors that are not the same each time.

    Args:
        changes: Changes of gradients inside a window.

    Returns:
        Number of changes, and whether their factors are unequal.
    """
    known = [f for f in map(_factors, changes) if f is not None]
    if not known or len(known) < len(changes) or len({f.size for f in known}) != 1:
        return 0, False
    factors = np.stack(known)
    high = np.where(np.isnan(factors), 0.0, factors).max(axis=0)
    seen = high > 0  # the others are masked, or have no gradient
    low = np.where(np.isnan(factors), math.inf, factors).min(axis=0)[seen]
    uneven = any(np.ptp(f[seen & ~np.isnan(f)]) > OTHER_FACTOR for f in known if (seen & ~np.isnan(f)).any())
    return (len(known) if (low > 0).all() else 0), uneven and bool(
        (high[seen] - low > OTHER_FACTOR * high[seen]).any() and low.all()
    )


def _factors(change: Change) -> Vector | None:
    """The factor of every element, NaN where it was 0 and is; None where some element grew or changed its sign."""
    before, after = change
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where((before == 0) & (after == 0), math.nan, after / before)
    some = factors[~np.isnan(factors)]
    return factors if some.size and some.min() >= 0 and some.max() <= 1 + AT_LIMIT else None


def narrow_format(a: Vector, g: Vector, counts: Sequence[int]) -> Format | None:
    """The format of 16 bits, or of whole numbers of 8, that holds every element of `a` while it does not hold those of `g`.

    Args:
        a: [P] gradient with micro-batches.
        g: [P] gradient of the reference.
        counts: Number of elements of each tensor.

    Returns:
        Its name, or None.
    """
    formats: tuple[Format, ...] = ("bfloat16", "float16")
    held = next((name for name in formats if _holds(a, name) and not _holds(g, name)), None)
    return held or ("int8" if _of_levels(a, counts) and not _of_levels(g, counts) else None)


def _of_levels(values: Vector, counts: Sequence[int]) -> bool:
    """Whether each tensor of some elements is of whole numbers up to 127, times a number of its own."""
    each = [np.abs(part[part != 0]) for part in np.split(values, np.cumsum(counts)[:-1])]
    few = [part[:: part.size // FEW_SEEN + 1] / part.max() for part in each if part.size >= FEWEST_ROUNDED]
    levels = [np.outer(np.arange(1.0, MOST_LEVELS + 1), part) for part in few]
    return bool(few) and all((abs(one - np.rint(one)).max(axis=1) <= MOST_LEVELS * FEW_ROUNDINGS).any() for one in levels)


@overflow_is_expected
def _holds(values: Vector, name: Format) -> bool:
    """Whether all are numbers of the format, as they are or but for one factor of all."""
    return _are_of(values, name) or _are_of(of_few_digits(values, SHORT[name == "float16"]), name)


def _are_of(values: Vector, name: Format) -> bool:
    if name == "float16":
        return bool(np.array_equal(values.astype(np.float16), values))
    single = values.astype(np.float32)  # of which bfloat16 is the upper half
    return bool(np.array_equal(single, values) and not (single.view(np.uint32) & 0xFFFF).any())


def lost(mine: Step, theirs: Step, nulls: Sequence[Step]) -> float:
    """Share of the reference's elements that are exactly 0 here, above the largest share among the nulls.

    Args:
        mine: The step with micro-batches.
        theirs: The reference's step.
        nulls: The same step in runs that differ from the reference by rounding alone.

    Returns:
        A share of 0 to 1.
    """
    there = theirs.gradient != 0

    def share(step: Step) -> float:
        return float((step.gradient[there] == 0).mean()) if there.any() and step.gradient.shape == there.shape else 0.0

    return share(mine) - max((share(null) for null in nulls), default=0.0)
