"""How well simple faults predict a gradient: each prediction is compared with what was seen, and nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from accumulation_harness.audit.compare.facts import Fits, Format, RankSum, WeightedSum
from accumulation_harness.audit.compare.windows import clipped_once, distance, off_line, raw, slices
from accumulation_harness.audit.evidence import Backward, Run, Step, Vector
from accumulation_harness.referee.gradients import decompose

MOST_PARTS = 64  # micro-batch gradients decomposed into
FEWEST = 4  # elements below which two directions are alike by chance
DEPENDENT = 1e-6  # of the largest singular value of the parts, below which they make up each other
LEFT_OVER = 10.0  # gates; a gradient of the step before that is smaller than this is rounding


class Fitted(NamedTuple):
    """What predictions and weights of the micro-batches say of a gradient."""

    fits: Fits = Fits()
    right: WeightedSum = WeightedSum()  # the reference gradient by what the backwards gave
    taken: WeightedSum = WeightedSum()  # what the step took, by the same


def fits(mine: Step, theirs: Step, before: Step | None, a: Vector, g: Vector, candidate: Run, gate: float) -> Fitted:
    """Predictions beside what was seen: `a` [P] of `mine` beside `g` [P] of `theirs`; `before`: the candidate's step before.

    Contributions are used where they were kept (`Backward.contribution`). Nothing is known of gradients that are not finite.
    """
    if not (np.isfinite(a).all() and np.isfinite(g).all()) or not g.any():
        return Fitted()
    if not a.any():
        return Fitted(_of_nothing(mine, theirs, g))
    found = _of_gradient(mine, a, g, candidate)
    total = mine.total
    if total is None or not np.isfinite(total).all():
        return Fitted(found)
    found = _of_sum(found, mine, theirs, before, a, g, candidate, gate)
    parts = _by_forward(giving(mine), gate)
    if not parts:
        return Fitted(found)
    right, taken = _decomposed(g, parts), _decomposed(a, parts)
    times, usual = _times(a, total, gate), _times(g, theirs.total, gate)
    right = replace(
        right,
        weights=tuple(w / times for w in right.weights),  # of what was stepped
        as_added=min(1.0, times) / min(1.0, usual),  # what shortens may be a clip that nobody saw
    )
    found = _by_part(found, mine, a, g, parts)
    if found.own_sum > gate and a.size >= FEWEST:  # one number is within any limit that it has
        found = replace(found, clamped=_clamped_sum(a, parts), clamped_parts=_clamped_parts(a, parts))
    return Fitted(found, right, taken)


def _times(a: Vector, total: Vector | None, gate: float) -> float:
    """By what a window's sum was multiplied (or divided) after it was added up; 1 where `a` is no multiple of it."""
    if total is None or not np.isfinite(total).all() or off_line(a, total) > gate:
        return 1.0
    return float(a @ total) / float(total @ total)


def giving(step: Step) -> list[Backward]:
    """The backwards that gave a finite gradient other than zero, where contributions were kept."""
    return [b for b in step.backwards if b.contribution is not None and b.finite and b.contribution.any()]


def _by_forward(backwards: Sequence[Backward], gate: float) -> list[Vector]:
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


def _of_gradient(mine: Step, a: Vector, g: Vector, candidate: Run) -> Fits:
    """Predictions from the reference gradient alone."""
    n, k, ranks, rows = candidate.accumulation_steps, len(mine.backwards), candidate.ranks, mine.num_rows
    far = a.size >= FEWEST
    return Fits(
        times_n=distance(a, n * g),
        times_k=distance(a, (k or 1) * g),
        squared=distance(a, n * n * g),
        over_n=distance(a, 1 / n * g),
        over_k=distance(a, 1 / (k or 1) * g),
        k_over_n=distance(a, k / n * g) if k else math.inf,
        times_rows=distance(a, rows * g) if rows else math.inf,
        over_rows=distance(a, g / rows) if rows else math.inf,
        times_ranks=distance(a, ranks * g) if ranks > 1 else math.inf,
        over_ranks=distance(a, g / ranks) if ranks > 1 else math.inf,
        line=off_line(a, g),
        along_weights=off_line(a - g, mine.before) if far else math.inf,
        along_signs=off_line(a - g, np.sign(mine.before)) if far else math.inf,
    )


def _of_sum(
    found: Fits, mine: Step, theirs: Step, before: Step | None, a: Vector, g: Vector, candidate: Run, gate: float
) -> Fits:
    """Predictions from the sum of what the backwards gave as well."""
    n, k, whole = candidate.accumulation_steps, len(mine.backwards), raw(theirs)
    assert mine.total is not None
    total = mine.total
    left = [] if before is None else [v for v in (before.gradient, raw(before)) if v.shape == a.shape]
    return replace(
        found,
        sum=distance(total, whole),
        sum_over_n=distance(1 / n * total, whole),
        sum_over_k=distance(1 / (k or 1) * total, whole),
        sum_times_n=distance(float(n) * total, whole),
        sum_line=off_line(a, total),
        own_sum=distance(a, total),
        sums=distance(total, theirs.total if theirs.total is not None else g),
        sums_line=off_line(total, theirs.total if theirs.total is not None else g),
        stale=min((distance(a, v + total) for v in left if _counts(v, g, gate)), default=math.inf),
        clipped_then_divided=_clipped_then_divided(mine, n),
    )


def _clipped_then_divided(mine: Step, n: int) -> float:
    if not clipped_once(mine) or mine.clips[0].before is None:
        return math.inf
    clip, before = mine.clips[0], mine.clips[0].before
    size = float(np.linalg.norm(before)) if clip.size is None else clip.size
    return distance(mine.gradient, before * min(1.0, clip.limit / size) / n)


def _counts(left: Vector, g: Vector, gate: float) -> bool:
    """Whether what may have been left over is more than rounding."""
    return float(np.linalg.norm(left)) > LEFT_OVER * gate * float(np.linalg.norm(g))


def _by_part(found: Fits, mine: Step, a: Vector, g: Vector, parts: Sequence[Vector]) -> Fits:
    """Predictions from what single backwards gave as well."""
    cleared = any(b.emptied for b in mine.backwards) or emptied_at_last(mine, a)
    groups = {b.reached for b in mine.backwards}
    own = [distance(_sum([b for b in mine.backwards if b.reached == group]), g) for group in groups] if len(groups) > 1 else []
    return replace(
        found,
        first=off_line(a, parts[0]),
        last=off_line(a, parts[-1]),
        since_clear=off_line(a, _since_clear(mine, a)) if cleared else math.inf,
        without_foreign=min(own, default=math.inf),
    )


def in_few(found: Fitted, a: Vector, mine: Step, every: Sequence[Vector], gate: float) -> Fitted:
    """With the clamp of a few numbers, a limit that steps reach again and again. `every`: these numbers in all steps."""
    sizes = np.abs(np.concatenate(every))
    limit = float(sizes.max(initial=0.0))
    parts = [b.contribution for b in giving(mine) if b.contribution is not None]
    if found.fits.own_sum <= gate or np.count_nonzero(sizes >= limit * (1 - AT_LIMIT)) < 2 or not parts:
        return found
    return found._replace(fits=replace(found.fits, clamped=_clamped_sum(a, parts, limit)))


AT_LIMIT = 1e-6  # relative; numbers that are nearer to each other are one


def _clamped_sum(a: Vector, parts: Sequence[Vector], limit: float | None = None) -> float:
    """The sum so far, clamped by value after every part: at its end it is nowhere larger than that value."""
    limit, total = np.abs(a).max() if limit is None else limit, np.zeros_like(a)
    for part in parts:
        total = np.clip(total + part, -limit, limit)
    return distance(a, total)


def _clamped_parts(a: Vector, parts: Sequence[Vector]) -> float:
    """Every part clamped by value, then added: where m are clamped to one side, the largest element is m times the value."""
    limits = [np.abs(a).max() / count for count in range(1, len(parts) + 1)]
    return min(distance(a, np.sum([np.clip(part, -limit, limit) for part in parts], axis=0)) for limit in limits)


def _of_nothing(mine: Step, theirs: Step, g: Vector) -> Fits:
    """The step took zeros, whatever the backwards had given."""
    if mine.total is None or not mine.total.any():
        return Fits()
    return Fits(since_clear=0.0, sums=distance(mine.total, theirs.total if theirs.total is not None else g))


def emptied_at_last(mine: Step, a: Vector) -> tuple[str, ...]:
    """The tensors without a gradient at the step, although the window's backwards gave them one."""
    if mine.total is None or mine.total.shape != a.shape:
        return ()
    return tuple(name for name, part in slices(mine).items() if mine.total[part].any() and not a[part].any())


def _since_clear(mine: Step, a: Vector) -> Vector:
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


def _sum(backwards: Sequence[Backward]) -> Vector:
    return np.asarray(np.sum([b.contribution for b in backwards if b.contribution is not None], axis=0))


def _decomposed(g: Vector, parts: Sequence[Vector]) -> WeightedSum:
    """Nothing is known where there are too many parts to tell them apart."""
    if len(parts) > MOST_PARTS or 2 * len(parts) > g.size:
        return WeightedSum()
    return weighted_sum(g, parts)


def weighted_sum(g: Vector, parts: Sequence[Vector]) -> WeightedSum:
    """`g` [P] as sum_k weights[k] parts[k], by least squares; where some parts make up another one, the weights nearest to 1."""
    made = decompose(torch.from_numpy(g), [torch.from_numpy(part) for part in parts])
    sizes = tuple(float(np.linalg.norm(part)) for part in parts)
    if 1 / DEPENDENT < made.condition < math.inf and all(sizes) and g.any():
        return _nearest_to_one(g, parts, sizes)
    weights = tuple(w / len(parts) for w in made.weights)
    return WeightedSum(weights=weights, residual=made.residual, condition=made.condition, sizes=sizes)


def _nearest_to_one(g: Vector, parts: Sequence[Vector], sizes: tuple[float, ...]) -> WeightedSum:
    """Directions in which the parts cancel say nothing of their weights (rows that are equal, say), and are left out."""
    matrix, rest = np.stack(parts, axis=1) / sizes, g - np.sum(parts, axis=0)
    u, singular, v = np.linalg.svd(matrix, full_matrices=False)
    kept = singular > DEPENDENT * singular[0]
    moved = v[kept].T @ ((u[:, kept].T @ rest) / singular[kept])
    return WeightedSum(
        weights=tuple((1 + moved / sizes).tolist()),
        residual=float(np.linalg.norm(rest - matrix @ moved) / np.linalg.norm(g)),
        condition=float(singular[0] / singular[kept][-1]),
        sizes=sizes,
    )


def by_rank(mine: Step, a: Vector, g: Vector, gate: float) -> RankSum:
    """`g` [P] as a sum of what every rank's micro-batches gave, before ranks were averaged.

    `weights[k][r]` belongs to micro-batch k of rank r: all 1 where every rank and micro-batch counts as it does in the candidate,
    whose gradient is their sum divided by the number of ranks.
    """
    locals_ = [b.locals for b in mine.backwards]
    if not locals_ or not all(locals_):
        return RankSum()
    parts = [part / len(ranks) for ranks in locals_ for part in ranks]
    if len(parts) > MOST_PARTS or 2 * len(parts) > g.size or not all(p.any() and np.isfinite(p).all() for p in parts):
        return RankSum()
    if any(part.shape != g.shape for part in parts):
        return RankSum()
    if not off_line(a, np.asarray(np.sum(parts, axis=0))) <= gate:  # what the ranks gave was not simply added
        return RankSum()
    made, width = weighted_sum(g, parts), len(locals_[0])
    weights = tuple(made.weights[i : i + width] for i in range(0, len(made.weights), width))
    return RankSum(weights=weights, residual=made.residual, condition=made.condition)


def narrow_format(a: Vector, g: Vector) -> Format | None:
    """The 16-bit format that holds every element of `a` while it does not hold those of `g`."""
    formats: dict[Format, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    return next((name for name, dtype in formats.items() if _holds(a, dtype) and not _holds(g, dtype)), None)


def _holds(values: Vector, dtype: torch.dtype) -> bool:
    tensor = torch.from_numpy(values)
    return bool(torch.equal(tensor.to(dtype).double(), tensor))


def lost(mine: Step, theirs: Step, nulls: Sequence[Step]) -> float:
    """Share of the reference's elements that are exactly 0 here, above the largest share among the nulls."""
    there = theirs.gradient != 0

    def share(step: Step) -> float:
        return float((step.gradient[there] == 0).mean()) if there.any() and step.gradient.shape == there.shape else 0.0

    return share(mine) - max((share(null) for null in nulls), default=0.0)


def rescaled(step: Step) -> tuple[float, ...]:
    """Norms that gradients had after somebody scaled them inside the window, and at the step where they were then too."""
    return tuple(_norms(step))


def _norms(step: Step) -> Iterator[float]:
    inside = [b.rescaled for b in step.backwards if not math.isnan(b.rescaled)]
    yield from inside
    if inside:
        yield float(np.linalg.norm(step.gradient))
