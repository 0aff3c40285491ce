"""How well simple faults predict a gradient: each prediction is compared with what was seen, and nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from harness.audit.compare.windows import clipped_once, cosine, distance, off_line, raw, slices
from harness.audit.evidence import Backward, Run, Step, Vector
from harness.referee.gradients import decompose

MOST_PARTS = 64  # micro-batch gradients decomposed into
FEWEST = 4  # elements below which two directions are alike by chance

Fits = dict[str, float]
Weights = tuple[tuple[float, ...], float]  # of the reference gradient on the parts, times their number; condition of the parts


def fits(
    mine: Step, theirs: Step, before: Step | None, a: Vector, g: Vector, candidate: Run, gate: float
) -> tuple[Fits, Weights]:
    """Relative distances of predictions from what was seen: `a` of `mine` beside `g` of `theirs`; `before`: the step before.

    Contributions are used where they were kept (`Backward.contribution`).
    """
    nothing: Weights = (), math.inf
    if not (np.isfinite(a).all() and np.isfinite(g).all()) or not g.any():
        return {}, nothing
    if not a.any():
        return _of_nothing(mine, theirs, g), nothing
    n, k, ranks = candidate.accumulation_steps, len(mine.backwards), candidate.ranks
    found = {
        name: distance(a, f * g)
        for name, f in (("N", n), ("K", k or 1), ("1/N", 1 / n), ("1/K", 1 / (k or 1)), ("K/N", k / n))
        if f
    }
    found["line"] = off_line(a, g)
    found |= {"R": distance(a, rows * g), "1/R": distance(a, g / rows)} if (rows := mine.num_rows) else {}
    found |= {"W": distance(a, ranks * g), "1/W": distance(a, g / ranks)} if ranks > 1 else {}
    found |= _penalties(mine, a, g, gate)
    total = mine.total
    if total is None or not np.isfinite(total).all():
        return found, nothing
    whole = raw(theirs)
    found |= {
        f"sum*{name}": distance(f * total, whole)
        for name, f in (("1", 1.0), ("1/N", 1 / n), ("1/K", 1 / (k or 1)), ("N", float(n)))
    }
    found["plain_sum"] = off_line(a, total)
    found["own_sum"] = distance(a, total)
    found["sums"] = distance(total, theirs.total if theirs.total is not None else g)
    if before is not None:
        left = [v for v in (before.gradient, raw(before)) if v.shape == a.shape and _counts(v, g, gate)]
        found["stale"] = min((distance(a, v + total) for v in left), default=math.inf)
    if clipped_once(mine) and mine.clips[0].before is not None:
        clip = mine.clips[0]
        norm = float(np.linalg.norm(mine.clips[0].before))
        found["clipped_then_divided"] = distance(mine.gradient, mine.clips[0].before * min(1.0, clip.limit / norm) / n)
    parts = [b.contribution for b in mine.backwards if b.contribution is not None and b.finite and b.contribution.any()]
    if not parts:
        return found, nothing
    weights, condition = _decomposed(found, g, parts)
    if found["plain_sum"] <= gate:  # divided (or multiplied) after they were added: weights are of what was stepped
        weights = tuple(w * float(total @ total) / float(a @ total) for w in weights)
    return found | _by_part(mine, a, g, parts), (weights, condition)


def _counts(left: Vector, g: Vector, gate: float) -> bool:
    """Whether what may have been left over is more than rounding."""
    return float(np.linalg.norm(left)) > 10 * gate * float(np.linalg.norm(g))


def _by_part(mine: Step, a: Vector, g: Vector, parts: Sequence[Vector]) -> Fits:
    found = {"first": off_line(a, parts[0]), "last": off_line(a, parts[-1])}
    if any(b.emptied for b in mine.backwards) or emptied_at_last(mine, a):
        found["since_clear"] = off_line(a, _since_clear(mine, a))
    groups = {b.reached for b in mine.backwards}
    if len(groups) > 1:
        own = [distance(_sum([b for b in mine.backwards if b.reached == group]), g) for group in groups]
        found["without_foreign"] = min(own)
    return found


def _of_nothing(mine: Step, theirs: Step, g: Vector) -> Fits:
    """The step took zeros, whatever the backwards had given."""
    if mine.total is None or not mine.total.any():
        return {}
    return {"since_clear": 0.0, "sums": distance(mine.total, theirs.total if theirs.total is not None else g)}


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


def _decomposed(found: Fits, g: Vector, parts: Sequence[Vector]) -> Weights:
    """Weights of `g` on the parts; the part of it outside their span is added to `found`."""
    if len(parts) > MOST_PARTS or 2 * len(parts) > g.size:
        return (), math.inf
    made = decompose(torch.from_numpy(g), [torch.from_numpy(p) for p in parts])
    found["span"] = made.residual
    return tuple(w / len(parts) for w in made.weights), made.condition


def by_rank(mine: Step, a: Vector, g: Vector, gate: float) -> tuple[float, tuple[tuple[float, ...], ...], float]:
    """(residual, weights, condition): `g` as a sum of what every rank's micro-batches gave, before ranks were averaged.

    `weights[k][r]` belongs to micro-batch k of rank r: all 1 where every rank and micro-batch counts as it does in the candidate,
    whose gradient is their sum divided by the number of ranks.
    """
    locals_ = [b.locals for b in mine.backwards]
    if not locals_ or not all(locals_):
        return math.inf, (), math.inf
    parts = [part / len(ranks) for ranks in locals_ for part in ranks]
    if len(parts) > MOST_PARTS or 2 * len(parts) > g.size or not all(p.any() and np.isfinite(p).all() for p in parts):
        return math.inf, (), math.inf
    if any(part.shape != g.shape for part in parts):
        return math.inf, (), math.inf
    if not off_line(a, np.asarray(np.sum(parts, axis=0))) <= gate:  # what the ranks gave was not simply added
        return math.inf, (), math.inf
    made = decompose(torch.from_numpy(g), [torch.from_numpy(part) for part in parts])
    weights, width = [w / len(parts) for w in made.weights], len(locals_[0])
    return made.residual, tuple(tuple(weights[i : i + width]) for i in range(0, len(weights), width)), made.condition


def _penalties(mine: Step, a: Vector, g: Vector, gate: float) -> Fits:
    """Differences along the parameters or their signs, in the tensors that differ at all."""
    size, apart = float(np.linalg.norm(g)), a - g
    wrong = [part for part in slices(mine).values() if float(np.linalg.norm(apart[part])) > gate * size]
    chosen = np.zeros(a.shape, dtype=bool)
    for part in wrong:
        chosen[part] = True
    if int(chosen.sum()) < FEWEST:
        return {}
    parameters = mine.before[chosen]
    return {"along_weights": off_line(apart[chosen], parameters), "along_signs": off_line(apart[chosen], np.sign(parameters))}


def partly(mine: Step, a: Vector, g: Vector, gate: float) -> tuple[str, ...]:
    """The tensors that differ, where others agree; those that differ are larger than they should be and point alike."""
    size = float(np.linalg.norm(g))
    differ: list[str] = []
    agree = 0
    for name, part in slices(mine).items():
        if float(np.linalg.norm((a - g)[part])) > gate * size:
            if not (cosine(a[part], g[part]) > 0.5 and np.linalg.norm(a[part]) > np.linalg.norm(g[part])):
                return ()
            differ.append(name)
        else:
            agree += bool(np.linalg.norm(g[part]) > gate * size)  # what is all rounding agrees with anything
    return tuple(differ) if agree else ()


def low_precision(a: Vector, g: Vector) -> str | None:
    """The 16-bit format that holds every element of `a` while it does not hold those of `g`."""
    for dtype in (torch.bfloat16, torch.float16):
        if _holds(a, dtype) and not _holds(g, dtype):
            return str(dtype).removeprefix("torch.")
    return None


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
