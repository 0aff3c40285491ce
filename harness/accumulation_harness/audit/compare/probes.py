"""Two runs whose rows, outputs and loss terms were looked at: what they show of the same rows, and of each addend of the loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from accumulation_harness.audit.compare.place import Place
from accumulation_harness.audit.compare.windows import effective, evaluations, finite
from accumulation_harness.audit.evidence import Matrix, Row, Run, Step, Term, Vector, given_by
from accumulation_harness.compare.linear import WeightedSum, distance, dot, norm, weighted_sum

SAME_SUM = 1e-5  # relative; the addends of a loss make up its gradient
SAME_SUM_ROUNDINGS = 100  # or, in coarse arithmetic, to so many roundings
FEWEST = 4  # features of a position, below which two slopes are multiples by chance
TOKENS_FIT = 0.01  # of what is left of the rows' slopes, which is left of those of their positions
NOTHING = 1e-6  # of a row's largest slope, below which that of a position is rounding

ALIKE = 1e-2  # relative; factors of rows that differ by less are one

Pair = tuple[int, Matrix, Matrix]  # micro-batch; slope of a row [positions, features] in candidate and reference


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """The same rows in candidate and reference, at equal parameters."""

    outputs: float = math.inf  # largest relative distance of the model's output for a row
    residual: float  # largest relative distance of a row's slope from a multiple of the reference's
    factors: tuple[tuple[float, ...], ...]  # these multiples, per micro-batch; 0 or infinite: the row counts in one run only
    tokens: bool = False  # whether residual and factors are of the positions of a row, since rows are no multiples
    first: float = 0.0  # residual of those of the window's first micro-batch, whose places are those at N=1

    @property
    def what(self) -> str:
        """What `factors` are of."""
        return "token" if self.tokens else "row"

    @property
    def chosen(self) -> bool:
        """Whether some rows count in one of the two runs only; not all tokens of a micro-batch, whose deviations may be 0."""
        parts = [part for part in self.factors if any(part)] if self.tokens else self.factors
        return any(f == 0 or math.isinf(f) for part in parts for f in part)

    @property
    def alike_where_chosen(self) -> bool:
        """Whether those that count in both runs do so alike in each micro-batch: they were chosen, and not weighed otherwise."""
        counting = [[f for f in part if f and not math.isinf(f)] for part in self.factors]
        return all(max(part) - min(part) <= ALIKE * max(map(abs, part)) for part in counting if part)

    @property
    def spread(self) -> float:
        """Largest difference of two rows' factors within one micro-batch, relative to the largest factor."""
        if any(math.isinf(f) for part in self.factors for f in part):
            return math.inf
        size = max((abs(f) for part in self.factors for f in part), default=0.0)
        return max((max(part) - min(part) for part in self.factors), default=0.0) / size if size else 0.0


@dataclass(frozen=True, kw_only=True)
class OneTerm:
    """What one addend of the loss gave to the candidate's gradient, beside what it gave to the reference's."""

    distance: float  # relative to the whole reference gradient
    scale: float  # of the candidate's along the reference's
    line: float  # distance of the candidate's from the reference's times `scale`; relative to the whole reference gradient
    parts: WeightedSum  # of the reference's on those of the micro-batches; residual relative to the whole reference gradient
    micro_batches: int  # of the probed window, also those without it
    coefficient: float  # by which the loss multiplies it, relative to the reference's; NaN where that is not known
    by_row: RowFacts | None = None  # outputs are not looked at


@dataclass(frozen=True, kw_only=True)
class TermFacts:
    """The reference gradient as a sum of what each addend of the loss gave to the candidate's."""

    parts: WeightedSum  # one part per addend
    each: tuple[OneTerm, ...] = ()  # the addends one by one, where both losses have the same number of them


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What extra runs have shown of a window that differs; nothing before they were made."""

    by_row: RowFacts | None = None
    by_term: TermFacts | None = None  # only where the loss is a sum
    mixed: bool = False  # in the reference, the model's output for one row depends on other rows
    coupled: bool = False  # at N=1, a row's loss depends on the outputs of a row that is in another micro-batch here
    of_all: bool = False  # at N=1, it depends on those of most rows: a function of their mean does
    elementwise: bool = False  # at N=1, the slope by an element of an output depends on that element alone
    place: Place | None = None  # where the difference begins, module by module
    agrees_when_frozen: bool = False  # the difference is gone when the parameters stay where they are
    held: tuple[str, ...] = ()  # paths of what the next micro-batch found as the window's first one did, in a further run
    is_bank: bool = False  # whether some of that is replaced in part, and the rest of it stays
    is_average: bool = False  # whether all of it that moves otherwise than at N=1 are averages or copies of the weights
    agrees_when_held: bool = False  # the difference is gone then
    alone: tuple[Vector, ...] = ()  # [P] what each micro-batch gives on its own, at N=1
    at_other: tuple[int, Vector] | None = None  # another number of micro-batches, and the gradient [P] that they give
    leaves: bool = False  # a micro-batch gives something else where the window's first one met other weights
    draws_count: bool = True  # whether other random numbers give another gradient at N=1, as far as that is known
    same_at_one: bool = False  # the comparison is with an independent function, and N=1 differs from it as well


def rows(mine: Run, theirs: Run) -> RowFacts | None:
    """Compare what two probed runs show of the same rows: outputs, and gradients of the loss by them.

    Where not all rows that were made from weights are known to both, the same ones are no sample of them.

    Args:
        mine: The candidate.
        theirs: The reference.

    Returns:
        The comparison; None when no row is known to both.
    """
    other = any(row not in theirs.probed for row, seen in mine.probed.items() if seen.computed)
    known = [row for row, seen in mine.probed.items() if row in theirs.probed and not (other and seen.computed)]
    shared = [row for row in known if _alike(mine.probed[row], theirs.probed[row])]
    used = [
        (mine.probed[row], theirs.probed[row]) for row in shared if theirs.probed[row].slope.any() or mine.probed[row].slope.any()
    ]
    if not used:
        return None
    outputs = [finite(distance(a.output, b.output)) for a, b in used]
    slopes = [(a.micro_batch, a.slope, b.slope) for a, b in used]
    return replace(_slopes(slopes), outputs=max(outputs))


def _slopes(pairs: Sequence[Pair]) -> RowFacts:
    """Slopes of all rows, and of those of the first micro-batch."""
    return replace(_slopes_of(pairs), first=_slopes_of([pair for pair in pairs if not pair[0]]).residual)


def _slopes_of(pairs: Sequence[Pair]) -> RowFacts:
    """Slopes of rows as multiples of the reference's; those of their positions, one by one, where that is what they are."""
    whole = _multiples([(k, a.reshape(1, -1), b.reshape(1, -1)) for k, a, b in pairs])
    if all(np.count_nonzero(slope) < 2 for _, *both in pairs for slope in both):  # a number is a multiple of any other
        return replace(whole, residual=math.inf)
    if not whole.residual > 0 or any(len(a) < 2 or a.shape[1] < FEWEST for _, a, _ in pairs):
        return whole
    each = _multiples(pairs)
    return replace(each, tokens=True) if each.residual < TOKENS_FIT * whole.residual else whole


def _multiples(pairs: Sequence[Pair]) -> RowFacts:
    """A row (or token) that counts in one of the two runs only has a factor of 0 or infinity, and no direction."""
    factors: dict[int, list[float]] = {}
    residual = 0.0
    for micro_batch, a, b in pairs:
        squared, sizes = (b * b).sum(axis=1), np.linalg.norm(a, axis=1)
        faint = NOTHING * max(sizes.max(), math.sqrt(squared.max()))
        known = (sizes > faint) | (np.sqrt(squared) > faint)
        along = np.divide((a * b).sum(axis=1), squared, out=np.full(len(a), math.inf), where=squared > 0)
        both = known & (squared > 0) & (sizes > 0)
        if both.any():
            multiple = along[both, None] * b[both]
            residual = max(residual, finite(distance(a[both], multiple)) if multiple.any() else math.inf)
        factors.setdefault(micro_batch, []).extend(along[known].tolist())
    return RowFacts(residual=residual, factors=tuple(tuple(factors[k]) for k in sorted(factors)))


def separated(mine: Run, reference: Run, index: int) -> bool:
    """Whether the reference's loss couples rows that are in different micro-batches of the candidate's step `index`.

    Args:
        mine: The accumulated run.
        reference: The run with whole batches.
        index: Which effective step.

    Returns:
        True where micro-batches cut a coupling.
    """
    if reference.coupled_copies > mine.coupled_copies:
        return True
    if not reference.coupled or not mine.tracks:
        return False
    steps = effective(mine.tracks[0])
    held = [set(b.rows or ()) for b in steps[index].backwards] if index < len(steps) else []
    seen = set().union(*held)  # a row and what an inner forward was handed of it have names of their own, of which one is known
    cut = [pair for pair in reference.coupled if len(seen & {*pair}) != 1 and not any(rows.issuperset(pair) for rows in held)]
    shared = [
        {row for pair in cut for row in pair if any((one, row) in mine.coupled for one in rows)} for rows in held
    ]  # with a row of each micro-batch: negatives that all of them have
    return not all(shared and set.intersection(*shared).intersection(pair) for pair in cut)


def of_all(reference: Run, index: int) -> bool:
    """Whether the loss of every row that was looked at depends on the outputs of most others of the reference's step `index`.

    Args:
        reference: The run with whole batches.
        index: Which effective step.

    Returns:
        True where rows are coupled with most others.
    """
    partners = Counter(row for row, _ in reference.coupled)
    rows = sum(step.num_rows for step in effective(reference.tracks[0])[index : index + 1]) if reference.tracks else 0
    return bool(partners) and 2 * min(partners.values()) >= rows - 1


def leaves_something(usual: Run, other: Run, index: int, gate: float) -> bool:
    """Decide whether the first micro-batch of a step influences the gradients of later ones.

    It was run once more on other weights; later micro-batches have forwards of their own and found the usual weights.

    Args:
        usual: The run as it is.
        other: The run whose first micro-batch met other weights.
        index: Which effective step.
        gate: The distance that rounding explains.

    Returns:
        True where later ones give another gradient then.
    """
    windows = [step.backwards for run in (usual, other) for step in effective(run.tracks[0])[index : index + 1]]
    pairs = list(zip(windows[0][1:], windows[-1][1:], strict=False)) if len(windows) == 2 else []
    pairs = list(takewhile(lambda pair: pair[0].moved is None, pairs))  # what meets weights that the first has moved is another
    given = [(a.contribution, b.contribution) for a, b in pairs if a.forwards]
    of_one_forward = len(given) == len(pairs)
    return of_one_forward and any(a is not None and b is not None and distance(b, a) > gate for a, b in given)


def terms(runs: tuple[Run, Run], place: int, index: int, only: Collection[str] = ()) -> TermFacts | None:
    """Compare a step of the reference with the addends of the candidate's loss.

    Args:
        runs: Candidate and reference.
        place: The optimizer's place in both.
        index: The optimizer step.
        only: Names of the tensors to compare; all of them if empty.

    Returns:
        The comparison; None where the addends do not make up the candidate's gradient.
    """
    mine, reference = runs
    parts, wanted = _addends(mine, place, index, only), effective(reference.tracks[place])
    if not parts or index >= len(wanted):
        return None
    sums, g = [_total(addend) for addend in parts], elements_of(wanted[index].unclipped, wanted[index], only)
    if not g.any():
        return None
    theirs = _addends(reference, place, index, only)
    pairs = zip(parts, theirs, strict=True) if len(parts) == len(theirs) else ()
    return TermFacts(
        parts=weighted_sum(g, sums) if all(part.any() for part in sums) else WeightedSum(),
        each=tuple(
            replace(
                _one_term(of_each, whole, norm(g)),
                by_row=_rows_of_term(mine, reference, number),
            )
            for number, (of_each, whole) in enumerate(pairs)
        ),
    )


def elements_of(values: Vector, step: Step, only: Collection[str]) -> Vector:
    """The elements of these tensors; all where none is named.

    Args:
        values: [P] one for each element of the step's tensors.
        step: Whose tensors these are.
        only: Names of tensors.

    Returns:
        Those values.
    """
    chosen = [place for place, (name, _) in enumerate(step.tensors) if name in only]
    return values[step.elements(chosen)] if chosen else values


def _addends(run: Run, place: int, index: int, only: Collection[str]) -> list[list[Term]]:
    """Per addend of the loss, what it gave in each backward of step `index`; empty where these do not add up to the gradient."""
    steps = effective(run.tracks[place])
    backwards = evaluations(steps[index])[-1] if index < len(steps) else ()
    total = given_by(backwards)
    if total is None or len({len(b.terms) for b in backwards}) != 1 or not backwards[0].terms:
        return []
    addends = [*zip(*(b.terms for b in backwards), strict=True)]
    whole = np.sum([term.gradient for addend in addends for term in addend], axis=0)
    same = distance(whole, total) <= max(SAME_SUM, SAME_SUM_ROUNDINGS * run.roundoff)
    known = same and np.isfinite(whole).all()
    cut = [[one._replace(gradient=elements_of(one.gradient, steps[index], only)) for one in addend] for addend in addends]
    return cut if known else []


def _total(addend: Sequence[Term]) -> Vector:
    """Of all backwards."""
    return np.asarray(np.sum([term.gradient for term in addend], axis=0))


def _one_term(mine: Sequence[Term], theirs: Sequence[Term], size: float) -> OneTerm:
    """One addend in each backward, beside that of N=1; `size`: norm of the whole reference gradient."""
    a, wanted = _total(mine), _total(theirs)
    squared, given = dot(wanted, wanted), [term.gradient for term in mine if term.gradient.any()]
    made = weighted_sum(wanted, given) if squared and given and 2 * len(given) <= a.size else WeightedSum()
    scale = dot(a, wanted) / squared if squared else math.inf
    return OneTerm(
        distance=norm(a - wanted) / size,
        scale=scale,
        line=norm(a - scale * wanted) / size if squared else math.inf,
        parts=made._replace(residual=made.residual * math.sqrt(squared) / size),
        micro_batches=len(mine),
        coefficient=mine[0].coefficient / theirs[0].coefficient if theirs[0].coefficient else math.nan,
    )


def _rows_of_term(mine: Run, reference: Run, place: int) -> RowFacts | None:
    """The slopes of addend `place` by the same rows; None where there are none."""
    theirs = {key: slope for of_one in reference.term_slopes if place < len(of_one) for key, slope in of_one[place].items()}
    pairs = [
        (micro_batch, slope, theirs[key])
        for micro_batch, of_one in enumerate(mine.term_slopes)
        for key, slope in (of_one[place].items() if place < len(of_one) else ())
        if key in theirs and theirs[key].any() and theirs[key].shape == slope.shape and slope.size > 1
    ]
    return _slopes(pairs) if pairs else None


def _alike(a: Row, b: Row) -> bool:
    return a.output.shape == b.output.shape and a.slope.shape == b.slope.shape
