"""Two runs whose rows, outputs and loss terms were looked at: what they show of the same rows, and of each addend of the loss."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from harness.audit.compare.facts import OneTerm, RowFacts, TermFacts, WeightedSum
from harness.audit.compare.fits import weighted_sum
from harness.audit.compare.windows import cosine, distance, effective, finite, raw
from harness.audit.evidence import Row, Run, Vector

SAME_SUM = 1e-5  # relative; the addends of a loss make up its gradient
SAME_SUM_ROUNDINGS = 100  # or, in coarse arithmetic, to so many roundings


def rows(mine: Run, theirs: Run) -> RowFacts | None:
    """What two probed runs show of the same rows: outputs, and slopes of the loss by them. None when no row is known to both."""
    shared = [row for row in mine.probed if row in theirs.probed and _alike(mine.probed[row], theirs.probed[row])]
    used = [
        (mine.probed[row], theirs.probed[row]) for row in shared if theirs.probed[row].slope.any() or mine.probed[row].slope.any()
    ]
    if not used:
        return None
    factors: dict[int, list[float]] = {}
    outputs = residual = 0.0
    for a, b in used:
        outputs = max(outputs, finite(distance(a.output, b.output)))
        size = float(b.slope @ b.slope)
        factor = float(a.slope @ b.slope) / size if size else math.inf
        if size and a.slope.any():  # a row that counts in one of the two only has a factor of 0 or infinity, and no direction
            residual = max(residual, finite(distance(a.slope, factor * b.slope)) if factor else math.inf)
        factors.setdefault(a.micro_batch, []).append(factor)
    return RowFacts(outputs=outputs, residual=residual, factors=tuple(tuple(factors[k]) for k in sorted(factors)))


def separated(mine: Run, reference: Run, index: int) -> bool:
    """Whether the reference's loss couples rows that are in different micro-batches of the candidate's step `index`."""
    if not reference.coupled or not mine.tracks:
        return False
    steps = effective(mine.tracks[0])
    held = [set(b.rows or ()) for b in steps[index].backwards] if index < len(steps) else []
    return not all(any(rows.issuperset(pair) for rows in held) for pair in reference.coupled)


def terms(mine: Run, reference: Run, index: int) -> TermFacts | None:
    """Step `index` of the reference by the addends of the candidate's loss; None where these do not make up its gradient."""
    parts, wanted = _addends(mine, index), effective(reference.tracks[0])
    if not parts or index >= len(wanted):
        return None
    sums, g = [np.sum(addend, axis=0) for addend in parts], raw(wanted[index])
    if not g.any():
        return None
    theirs = _addends(reference, index)
    pairs = zip(parts, theirs, strict=True) if len(parts) == len(theirs) else ()
    return TermFacts(
        parts=weighted_sum(g, sums) if all(part.any() for part in sums) else WeightedSum(),
        each=tuple(
            replace(
                _one_term(of_each, np.sum(whole, axis=0), float(np.linalg.norm(g))), off_rows=_off_rows(mine, reference, place)
            )
            for place, (of_each, whole) in enumerate(pairs)
        ),
    )


def _addends(run: Run, index: int) -> list[list[Vector]]:
    """Per addend of the loss, what it gave in each backward of step `index`; empty where these do not add up to the gradient."""
    steps = effective(run.tracks[0]) if run.tracks else []
    if not run.terms or len({len(of_one) for of_one in run.terms}) != 1 or not run.terms[0] or index >= len(steps):
        return []
    parts = [list(addend) for addend in zip(*run.terms, strict=True)]
    whole, total = np.sum([np.sum(addend, axis=0) for addend in parts], axis=0), steps[index].total
    same = total is not None and distance(whole, total) <= max(SAME_SUM, SAME_SUM_ROUNDINGS * run.roundoff)
    return parts if same and np.isfinite(whole).all() else []


def _one_term(parts: list[Vector], wanted: Vector, size: float) -> OneTerm:
    """One addend by what it gave in each backward, beside `wanted` [P] at N=1; `size`: norm of the whole reference gradient."""
    a, squared = np.sum(parts, axis=0), float(wanted @ wanted)
    given = [part for part in parts if part.any()]
    made = weighted_sum(wanted, given) if squared and given and 2 * len(given) <= a.size else WeightedSum()
    return OneTerm(
        distance=float(np.linalg.norm(a - wanted)) / size,
        scale=float(a @ wanted) / squared if squared else math.inf,
        parts=replace(made, residual=made.residual * math.sqrt(squared) / size),
    )


def _off_rows(mine: Run, reference: Run, place: int) -> float:
    """How far slopes of addend `place` by the same rows are from multiples of the reference's."""
    a, b = [
        {key: slope for of_one in run.term_slopes if place < len(of_one) for key, slope in of_one[place].items()}
        for run in (mine, reference)
    ]
    shared = [(a[key], b[key]) for key in a.keys() & b.keys() if b[key].any() and a[key].shape == b[key].shape]
    apart = (math.sqrt(max(0.0, 1 - cosine(x, y) ** 2)) if x.any() else 0.0 for x, y in shared if x.size > 1)
    return max(apart, default=math.inf)


def _alike(a: Row, b: Row) -> bool:
    return a.output.shape == b.output.shape
