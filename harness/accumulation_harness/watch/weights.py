"""Rung 1: do all loss terms of a window weigh alike, and together one? Every loss of a micro-batch is weighed by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from accumulation_harness.compare.readings import Weighed, alike, near
from accumulation_harness.watch.evidence import MicroBatch, Remark, Window
from accumulation_harness.watch.gradients import Sum
from accumulation_harness.watch.slopes import Loss, Slope

COMPLETE = 1e-3  # of the loss, which the recognised terms must add up to
TOLERANCE = 1e-3  # of a weight; or four residuals of the fit, where these are larger
BY_VECTOR = (Loss.cross_entropy, Loss.margin, Loss.sequences)  # with one term for all entries of a vector
Key = tuple[Loss, int, int, int]  # a loss of the run: its kind, its classes, its form, its place among those alike


def weights_of(window: Window, summed: Sum, rows_apart: bool) -> tuple[dict[Key, Weighed], Remark | None]:
    """Weigh the terms of every loss of a window.

    Args:
        window: The window.
        summed: The sum of its gradients.
        rows_apart: Whether each term of a loss of the run's own is said to depend on its own row alone.

    Returns:
        The weights of each loss; and why they are not known, or do not cover all that was differentiated.
    """
    looked = [m.slopes for m in window.micro_batches]
    if any(slopes is None for slopes in looked) or (not window.alone and window.ranks is None):
        return {}, None  # what the other ranks hold is looked at in a sample of windows
    slopes = [slope for each in looked for slope in each or () if slope.terms]
    if not slopes:
        return {}, Remark.logits_unseen
    by_key: dict[Key, list[tuple[MicroBatch, Slope]]] = {}
    for m in window.micro_batches:
        for key, slope in _losses(m.slopes or ()):
            by_key.setdefault(key, []).append((m, slope))
    why = _incomplete(window, slopes, rows_apart)
    if any(_is_unknown(m.slopes) for m in window.micro_batches if m.slopes):
        return {}, why  # the terms of the window are not all known
    unseen = any(slope.constants is None for slope in slopes)  # what a loss was multiplied by
    apart = bool(summed.findings) or window.hooked or why is Remark.another_term or (unseen and len(by_key) > 1)
    return {key: _weighed(key, pairs, window, summed, apart=apart) for key, pairs in by_key.items()}, why


def _is_unknown(slopes: Sequence[Slope]) -> bool:
    """Whether none of a micro-batch's losses is known, or one that the graph shows has terms in no way that is known."""
    return all(slope.kind is None for slope in slopes) or any(slope.kind is None and slope.picked for slope in slopes)


def _losses(slopes: Sequence[Slope]) -> Iterator[tuple[Key, Slope]]:
    """The losses of a micro-batch; those of one kind whose terms weigh alike are one, as a loss in chunks is."""
    found: dict[Key, Slope] = {}
    for number, slope in enumerate(slopes):
        if slope.kind is None or not slope.terms:
            continue
        of_kind, place = (slope.kind, slope.classes, slope.form), number if slope.kind is Loss.own else 0  # in the graph
        while (key := (*of_kind, place)) in found and not alike((found[key].weight, slope.weight), TOLERANCE):
            place += 1
        known = found.get(key)
        found[key] = slope if known is None else known.joined(slope)
    yield from found.items()


def _weighed(key: Key, pairs: Sequence[tuple[MicroBatch, Slope]], window: Window, summed: Sum, *, apart: bool) -> Weighed:
    """`apart`: the total of the terms cannot be judged."""
    slopes, ranks = [slope for _, slope in pairs], window.ranks
    total, world = sum(slope.terms for slope in slopes), 1
    if ranks is not None and all(ranks.terms):
        total, world = sum(ranks.terms), len(ranks.terms)
    factors = {id(m): summed.factor for m, _ in pairs}
    if summed.weights and not summed.findings:
        factors = {id(m): weight for m, weight in zip(window.micro_batches, summed.weights, strict=True)}
    return Weighed(
        loss=key[0],
        window=window.index,
        shares=tuple(slope.weight * slope.bend * m.hooks * factors[id(m)] / m.scale * total for m, slope in pairs),
        terms=tuple(slope.terms for slope in slopes),
        num=len(window.micro_batches),
        rows=tuple(slope.rows for slope in slopes),
        positions=() if any(math.isnan(slope.positions) for slope in slopes) else tuple(slope.positions for slope in slopes),
        width=1 if key[0] in BY_VECTOR else key[1],
        calls=max(slope.calls for slope in slopes),
        constants=slopes[0].multipliers,
        total=total,
        world=world,
        multiplied=not near(summed.factor, 1, TOLERANCE),
        norm=window.norm,
        scaled=apart,
        unsaid=any(slope.picked and not m.said and (slope.fixed or not slope.counted) for m, slope in pairs),
        resumed=window.resumed,
        tolerance=max([TOLERANCE, *(4 * slope.residual for slope in slopes)]),
    )


def _incomplete(window: Window, slopes: Sequence[Slope], rows_apart: bool) -> Remark | None:
    """Whether the losses that were recognised add up to what was differentiated, and hang on their own row alone."""
    if any(slope.kind is None for slope in slopes):
        return Remark.ragged if any(slope.ragged for slope in slopes) else Remark.unknown_loss
    if all(slope.diagonal for slope in slopes):
        return Remark.diagonal
    if any(m.others for m in window.micro_batches):
        return Remark.another_term
    for m in window.micro_batches:
        own = [slope for slope in m.slopes or () if slope.terms]
        if any(math.isnan(slope.value) for slope in own):  # the graph has shown all that was differentiated
            continue
        known = sum(slope.weight * slope.value for slope in own) / m.scale
        wide = max([COMPLETE, *(4 * slope.residual for slope in own)])
        if not abs(known - m.loss) <= wide * max(abs(known), abs(m.loss)):
            return Remark.another_term
    known = rows_apart and all(slope.counted for slope in slopes if slope.picked)
    unsaid = any(slope.picked for slope in slopes) and not known and not all(m.said for m in window.micro_batches)
    return Remark.own_terms if unsaid else None
