"""What the sum of a window's contributions says: which parts it has, what was cleared, clamped, rounded or lost in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accumulation_harness.audit.compare.facts import Format
from accumulation_harness.audit.compare.windows import slices
from accumulation_harness.audit.evidence import Backward, Step, Vector, overflow_is_expected
from accumulation_harness.compare.linear import WeightedSum, distance, off_line, weighted_sum

MOST_PARTS = 64  # micro-batch gradients decomposed into


def giving(step: Step) -> list[Backward]:
    """The backwards that gave a finite gradient other than zero, where contributions were kept."""
    return [b for b in step.backwards if b.contribution is not None and b.finite and b.contribution.any()]


def by_forward(backwards: Sequence[Backward], gate: float) -> list[Vector]:
    """What each gave; a second backward of one forward that gives a multiple of the first counts that one again."""
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
    """`g` as a sum of the parts; nothing is known of too many."""
    return weighted_sum(g, parts) if 0 < len(parts) <= MOST_PARTS else WeightedSum()


def by_rank(mine: Step, a: Vector, g: Vector, gate: float) -> WeightedSum:
    """`g` [P] as a sum of what every rank's micro-batches gave, before ranks were averaged; rank after rank, by micro-batch.

    All weights are 1 where every rank and micro-batch counts as it does in the candidate, whose gradient is their sum divided by
    the number of ranks.
    """
    parts = [part / len(b.locals) for b in mine.backwards for part in b.locals]
    if not all(b.locals for b in mine.backwards) or not all(part.shape == g.shape and part.any() for part in parts):
        return WeightedSum()
    added = bool(parts) and off_line(a, np.asarray(np.sum(parts, axis=0))) <= gate  # not so where what the ranks gave was changed
    return decomposed(g, parts) if added else WeightedSum()


def emptied_at_last(mine: Step, a: Vector) -> tuple[str, ...]:
    """The tensors without a gradient at the step, although the window's backwards gave them one."""
    if mine.total is None or mine.total.shape != a.shape:
        return ()
    return tuple(name for name, part in slices(mine).items() if mine.total[part].any() and not a[part].any())


def since_clear(mine: Step, a: Vector) -> Vector:
    """What each tensor was given after its gradient was cleared for the last time."""
    kept, parts = np.zeros_like(a), slices(mine)
    places = list(parts.values())
    for b in mine.backwards:
        for place in b.emptied:
            kept[places[place]] = 0
        kept = kept + b.contribution if b.contribution is not None else kept
    for name in emptied_at_last(mine, a):
        kept[parts[name]] = 0
    return kept


def clamped_sum(a: Vector, parts: Sequence[Vector], limit: float) -> float:
    """The sum so far, clamped by value after every part."""
    total = np.zeros_like(a)
    for part in parts:
        total = np.clip(total + part, -limit, limit)
    return distance(a, total)


def clamped_parts(a: Vector, parts: Sequence[Vector]) -> float:
    """Every part clamped by value, then added: where m are clamped to one side, the largest element is m times the value."""
    limits = [np.abs(a).max() / count for count in range(1, len(parts) + 1)]
    return min(distance(a, np.sum([np.clip(part, -limit, limit) for part in parts], axis=0)) for limit in limits)


def narrow_format(a: Vector, g: Vector) -> Format | None:
    """The 16-bit format that holds every element of `a` while it does not hold those of `g`."""
    formats: tuple[Format, ...] = ("bfloat16", "float16")
    return next((name for name in formats if _holds(a, name) and not _holds(g, name)), None)


@overflow_is_expected
def _holds(values: Vector, name: Format) -> bool:
    if name == "float16":
        return bool(np.array_equal(values.astype(np.float16), values))
    single = values.astype(np.float32)  # of which bfloat16 is the upper half
    return bool(np.array_equal(single, values) and not (single.view(np.uint32) & 0xFFFF).any())


def lost(mine: Step, theirs: Step, nulls: Sequence[Step]) -> float:
    """Share of the reference's elements that are exactly 0 here, above the largest share among the nulls."""
    there = theirs.gradient != 0

    def share(step: Step) -> float:
        return float((step.gradient[there] == 0).mean()) if there.any() and step.gradient.shape == there.shape else 0.0

    return share(mine) - max((share(null) for null in nulls), default=0.0)
