"""What the weights of loss terms mean: every reading that fits all windows of a run, and a name where one alone is left.

A loss term of a window with W terms should weigh 1/W. What it weighs beside that, its *share*, is 1 where the loop is right.
Shares have a form (how they run over the micro-batches of a window) and a factor (what they are together):

    share_k = form_k * divisor * times * coefficient

with few forms and divisors, `times` one of 1, K, N, 1/K, 1/N, K/N (K micro-batches in the window, N usually), world and
1/world, and a coefficient that the loss itself was multiplied by. Readings that predict the same in all windows are rivals, and
no name is given that a right loop could have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import combinations, islice
from typing import NamedTuple

from accumulation_harness.judge.cause import Cause, Causes

MOST_CONSTANTS = 4  # on the way from the root of a backward to a loss, of which products are taken
UNEQUAL = Cause.mean_of_means


class Form(Enum):
    """How shares run over the micro-batches of a window; what it is in words, where it is wrong."""

    terms = ""
    micro_batches = "every micro-batch weighs the same whatever its number of loss terms"
    positions = "every micro-batch is divided by its own positions, padding included"
    rows = "micro-batches weigh by their rows, whatever their number of loss terms"


class Divisor(Enum):
    """What the loss terms of a window are divided by, in words; whether this is another count than it should be."""

    terms = "", None
    one = "every loss term weighs 1: a sum", None
    rows = "the sum of the loss terms is divided by the rows", None
    vectors = "the sum of the loss terms is divided by the vectors that they are entries of", None
    positions = "the loss is divided by all positions, padding included", Cause.counter_wrong
    terms_and_rows = (
        "the loss is divided by one more per row than its terms, as labels before their shift are",
        Cause.counter_wrong,
    )
    own = "ranks are averaged although their numbers of loss terms differ", UNEQUAL
    tasks = "several losses of one kind, each with terms of its own", None

    def __init__(self, words: str, cause: Cause | None) -> None:
        self.words, self.cause = words, cause


class Times(Enum):
    """What the weights of a window are multiplied by, K micro-batches of usually N; what is wrong then."""

    one = 0, None
    count = 1, Cause.loss_not_divided
    usual = 2, Cause.loss_not_divided
    by_count = 3, Cause.loss_divided_twice
    by_usual = 4, Cause.loss_divided_twice
    short = 5, Cause.short_window_divided_by_n
    ranks = 6, Cause.replica_scale
    by_ranks = 7, Cause.replica_scale

    def __init__(self, _number: int, cause: Cause | None) -> None:
        self.cause = cause


class Constant(NamedTuple):
    """A factor between the result of a loss function and the root of the backward pass."""

    factor: float
    divides: bool = False  # written as a division


class Reading(NamedTuple):
    """One way in which shares may have come about."""

    form: Form = Form.terms
    divisor: Divisor = Divisor.terms
    times: Times = Times.one
    coefficient: float = 1.0  # of the loss itself, to six digits
    doubtful: bool = False  # whether the coefficient may as well be a count

    @property
    def causes(self) -> Causes:
        """What is wrong then, the whole first; empty where nothing is."""
        form = None if self.form is Form.terms else UNEQUAL
        return tuple(dict.fromkeys(cause for cause in (self.times.cause, self.divisor.cause, form) if cause is not None))


RIGHT = Reading()


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """The weights that one loss has in one window's gradient, by micro-batch."""

    window: int
    shares: tuple[float, ...]  # [K] what a loss term of each micro-batch weighs, of what it should
    terms: tuple[float, ...]  # [K]
    num: int  # micro-batches of the window; K of them have terms of this loss
    loss: str = ""  # what it is called
    rows: tuple[int, ...] = ()  # [K]; empty where not known, as positions
    positions: tuple[int, ...] = ()
    width: int = 1  # loss terms of a vector of the last dimension
    calls: int = 1  # of the loss function in a micro-batch: chunks of one loss, or several of one kind
    constants: tuple[Constant, ...] | None = ()  # None where they were not seen
    total: float = math.nan  # terms of the window over all ranks; NaN: those above
    world: int = 1
    multiplied: bool = False  # the gradient was multiplied after the backwards, by a factor that is in the shares
    norm: float = math.nan  # of the gradient at the step
    scaled: bool = False  # the whole gradient was multiplied by a factor of another meaning: the form alone can be judged
    resumed: bool = False  # a window that a run has begun with after its start
    tolerance: float = 1e-3
    unsaid: bool = False  # what the terms are is not known for sure: other ones may weigh what they should
    _known: dict[int, frozenset[Reading]] = field(default_factory=dict, repr=False, compare=False)  # by N

    @cached_property
    def is_right(self) -> bool:
        """Whether every term weighs what it should."""
        return alike(self.shares, self.tolerance) and (self.scaled or near(self.shares[0], 1.0, self.tolerance))

    @property
    def parts(self) -> list[float]:
        """What each micro-batch weighs; 1 together where the window is right."""
        return [share * n / self.all_terms for share, n in zip(self.shares, self.terms, strict=True)]

    @property
    def evidence(self) -> dict[str, object]:
        """What a report shows of it."""
        return {
            "loss": self.loss,
            "loss terms": [round(n, 3) for n in self.terms[:16]],
            "weight of a term over the right weight": [float(f"{share:.4g}") for share in self.shares[:16]],
        }

    def readings(self, usual: int) -> frozenset[Reading]:
        """All that fit, in a run whose windows have `usual` micro-batches."""
        if usual not in self._known:
            self._known[usual] = frozenset(self._readings(usual))
        return self._known[usual]

    def _readings(self, usual: int) -> Iterator[Reading]:
        for form, factor in self.fitting:
            for coefficient, doubtful in self._coefficients(usual):
                for divisor, divided in self._divisors() if form is Form.terms else self._units():
                    fixed = divisor is Divisor.one  # a sum of terms, divided by nothing or by a number that may be a count
                    for times, multiplied in [(Times.one, 1.0)] if fixed else self._times(usual):
                        if self.scaled or near(factor, divided * multiplied * coefficient, self.tolerance):
                            unsure = doubtful or (fixed and (coefficient != 1 or bool(self._multiplied_by(usual))))
                            yield Reading(form, divisor, times, round(coefficient, 6), unsure)

    @cached_property
    def fitting(self) -> list[tuple[Form, float]]:
        """The forms that fit, each with the factor of it all."""
        of_forms = [(form, [s / part for s, part in zip(self.shares, pattern, strict=True)]) for form, pattern in self._forms()]
        return [(form, sum(factors) / len(factors)) for form, factors in of_forms if alike(factors, self.tolerance)]

    @property
    def all_terms(self) -> float:
        """Of the window, over all ranks."""
        return sum(self.terms) if math.isnan(self.total) else self.total

    def _forms(self) -> Iterator[tuple[Form, Sequence[float]]]:
        """How shares run, each with the total weight of what it should be."""
        own, k = self.all_terms / self.world, self.num
        yield Form.terms, [1.0] * len(self.shares)
        yield Form.micro_batches, [own / (k * n) for n in self.terms]
        if self.rows and all(self.rows):
            yield Form.rows, [r / sum(self.rows) * own / n for r, n in zip(self.rows, self.terms, strict=True)]
        if self.positions:
            yield Form.positions, [own / (k * p) for p in self.positions]

    def _divisors(self) -> Iterator[tuple[Divisor, float]]:
        own = sum(self.terms)
        yield from self._units()
        yield Divisor.one, self.all_terms
        if self.world > 1:
            yield Divisor.own, self.all_terms / (self.world * own)
            return
        if self.rows and all(self.rows):
            yield Divisor.rows, own / sum(self.rows)
            if own > sum(self.rows):
                yield Divisor.terms_and_rows, own / (own + sum(self.rows))
        if self.positions:
            yield Divisor.positions, own / sum(self.positions)

    def _units(self) -> Iterator[tuple[Divisor, float]]:
        """What a loss may be a mean over."""
        yield Divisor.terms, 1.0
        if self.calls > 1:
            yield Divisor.tasks, float(self.calls)
        if self.width > 1:
            yield Divisor.vectors, float(self.width)

    def _multiplied_by(self, usual: int) -> list[Constant]:
        """The constants that are a multiplication by N, and none by the number of ranks."""
        found = [c for c in self.constants or () if usual > 1 and near(c.factor, usual, 1e-6) and not c.divides]
        return [] if near(usual, self.world, 1e-6) else found

    def _times(self, usual: int) -> Iterator[tuple[Times, float]]:
        """Where it was seen what a loss is divided by, a division too few has none by N, and one too many has one."""
        k, blind = self.num, self.constants is None or self.multiplied
        by_n = [c for c in self.constants or () if near(c.factor, 1 / usual, 1e-6) or near(c.factor, 1 / k, 1e-6)]
        own = {*self.terms, *self.positions, *self.rows, self.calls}
        yield Times.one, 1.0
        if usual > 1 and (blind or self._multiplied_by(usual) or all(_counts(1 / c.factor, own) for c in by_n)):
            yield from ((Times.count, k), (Times.usual, usual))
        if usual > 1 and (blind or by_n):
            yield from ((Times.by_count, 1 / k), (Times.by_usual, 1 / usual))
        if k <= usual and (blind or by_n or self.resumed or any(near(c.factor, k / usual, 1e-6) for c in self.constants or ())):
            yield Times.short, k / usual
        if self.world > 1:
            yield from ((Times.ranks, self.world), (Times.by_ranks, 1 / self.world))

    def _coefficients(self, usual: int) -> Iterator[tuple[float, bool]]:
        """Products of the constants that are no count of this window, and whether one of them may be a count all the same.

        A division by N is no coefficient; with N = 2 it may be. A multiplication by N is one, or undoes a division. Other
        divisors may be counts of something that is not known here.

        Args:
            usual: N of a full window.

        Yields:
            A product of some of the constants, and whether one of them may be a count all the same.
        """
        counts = {sum(self.terms), sum(self.positions), sum(self.rows), sum(self.terms) + sum(self.rows), self.total}
        counts |= {each for own in (self.terms, self.positions, self.rows) for each in own[:1]}  # whose constants these are
        kept: list[tuple[float, bool]] = []
        for factor, divides in self.constants or ():
            by_n = near(factor, 1 / usual, 1e-6)
            of_n = by_n or near(factor, usual, 1e-6)
            if self.world > 1 and (near(factor, self.world, 1e-6) or near(factor, 1 / self.world, 1e-6)):
                continue  # of the ranks
            if of_n and (usual == 2 or not (by_n and divides)):  # a multiplication by N may undo a division by it
                kept.append((factor, True))
            elif factor and not of_n and not (divides and _counts(1 / factor, counts)):
                kept.append((factor, divides or _counts(1 / factor, counts)))
        for size in range(min(len(kept), MOST_CONSTANTS) + 1):
            for chosen in combinations(kept[:MOST_CONSTANTS], size):
                yield math.prod(factor for factor, _ in chosen), any(unsure for _, unsure in chosen)


def _counts(number: float, counts: set[float]) -> bool:
    return any(near(number, count, 1e-6) for count in counts)


class Told(NamedTuple):
    """What all windows together say of one loss."""

    right: bool = False
    causes: Causes = ()
    words: str = ""  # why it is wrong, or neither right nor wrong
    windows: tuple[Weighed, ...] = ()  # those that are wrong


def told(seen: Sequence[Weighed], usual: int, known: Sequence[Weighed] = ()) -> Told:
    """Explain the weights of loss terms by a cause, over all windows of a run.

    Args:
        seen: The weights of each loss in each window.
        usual: The usual number of micro-batches of a window.
        known: Those among them that are known to be right, whatever their weights are.

    Returns:
        The cause or causes, or that the weights are right. If it rests on an assumption about the terms of a loss of the run's
        own, there is a description and no cause.
    """
    found = _told(seen, usual, known)
    if not found.right and not found.causes and _are_clipped(seen):
        found = _told([replace(one, scaled=True) for one in seen], usual, known)
    if not found.causes or not any(one.unsaid for one in seen):
        return found
    causes = " and ".join(found.causes)
    return Told(words=f"{causes}, if the terms of the run's own loss are what they seem (`seen.terms` tells): {found.words}")


def _are_clipped(seen: Sequence[Weighed]) -> bool:
    """Whether gradients are clipped by hand after the backwards, which says nothing of their whole.

    Then they are shortened by another factor in every window, to one length that no window exceeds.

    Returns:
        True if the shares of the gradient that the backwards explain differ, and the norms are all the same.
    """
    shortened = [one for one in seen if one.multiplied and one.world == 1]
    if not shortened:
        return False
    tolerance, shares, norms = seen[0].tolerance, [one.shares[0] for one in shortened], [one.norm for one in shortened]
    clipped = alike(norms, tolerance) and all(one.norm <= (1 + tolerance) * norms[0] for one in seen)
    return clipped and max(shares) <= 1 + tolerance and (len(shares) == 1 or not alike(shares, tolerance))


def _told(seen: Sequence[Weighed], usual: int, known: Sequence[Weighed]) -> Told:
    if not seen or all(one.is_right for one in seen):
        alias = "" if any(one.num != usual for one in seen) else next(filter(None, (_alias(one, usual) for one in seen)), "")
        return Told(right=bool(seen) and not alias, words=alias)
    common, steady = _common(seen, usual), _is_steady(seen)
    if known and not any(RIGHT in one.readings(usual) for one in known) and (common & _common(known, usual) or steady):
        return Told(right=True)  # the loss has another weighting than the mean over its terms
    wrong = tuple(one for one in seen if RIGHT not in one.readings(usual))
    if not common:  # a fault of some windows alone
        common = frozenset(reading for reading in _common(wrong, usual) if reading.causes or reading.coefficient == 1)
    if all(one.num == usual for one in seen):  # which a short window may be divided by, none shows
        common = frozenset(reading for reading in common if reading.times is not Times.short)
    forms = [one for one in common if one.form is Form.terms or one._replace(form=Form.terms) not in common]  # that are needed
    named = _fewest([reading for reading in forms if reading.causes and not reading.doubtful])
    if any(reading.divisor is Divisor.terms or not named for reading in common if not (reading.causes or reading.doubtful)):
        return Told(right=True)
    rivals = [reading for reading in common if not reading.causes]
    if steady and usual == 2 and any(one.constants is None for one in seen):  # half a loss, or twice of it, is an everyday thing
        rivals.append(Reading(coefficient=steady, doubtful=True))
    shared = next((one for one in named if all({*one.causes} <= {*other.causes} for other in named)), None)
    if shared is not None and not rivals:
        return Told(causes=_in_place(shared.causes, wrong, usual), words=_words(shared, wrong[0], usual), windows=wrong)
    return Told(words=_unnamed(seen, [*named, *rivals]), windows=wrong)


def _alias(one: Weighed, usual: int) -> str:
    """Why terms that weigh what they should may do so by chance: a coefficient of the loss that is a division by N as well."""
    constants = one.constants or ()
    by_n = [c for c in constants if near(c.factor, 1 / usual, 1e-6)]
    of_n = one._multiplied_by(usual)
    undone = len(by_n) > 1 or near(math.prod(c.factor for c in constants), 1 / usual, 1e-6)  # by one more division
    if usual < 2 or one.scaled or (all(c.divides for c in by_n) and not (of_n and undone)):
        return ""
    shown = f"{(of_n or by_n)[0].factor:.4g}"
    return (
        f"the loss is multiplied by {shown}, with {usual} micro-batches: a coefficient of its own, or a division by their number"
    )


def _common(seen: Sequence[Weighed], usual: int) -> frozenset[Reading]:
    return frozenset.intersection(*(one.readings(usual) for one in seen))


def _is_steady(seen: Sequence[Weighed]) -> float:
    """The factor of all windows where it is one, of one form; else 0."""
    wholes = [one.fitting[0] for one in seen if one.fitting]
    factors = [factor for _, factor in wholes]
    same = len(factors) == len(seen) and len({form for form, _ in wholes}) == 1
    return factors[0] if same and alike(factors, max(one.tolerance for one in seen)) else 0.0


def _fewest(readings: Sequence[Reading]) -> list[Reading]:
    """Those that take the fewest assumptions."""

    def assumed(reading: Reading) -> int:
        return len(reading.causes) + (reading.coefficient != 1)

    least = min(map(assumed, readings), default=0)
    plain = [*Divisor, *Form, *Times]
    found = [reading for reading in readings if assumed(reading) == least]
    return sorted(found, key=lambda reading: [plain.index(part) for part in (reading.divisor, reading.form, reading.times)])


def _in_place(causes: Causes, wrong: Sequence[Weighed], usual: int) -> Causes:
    """What is wrong at the beginning of a run alone, or where its data end inside a window, is wrong with the window."""
    if causes == (Cause.short_window_divided_by_n,) and all(one.window == 0 and one.num < usual for one in wrong):
        return (Cause.resume_in_window if wrong[0].resumed else Cause.window_misplaced,)
    if causes == (UNEQUAL,) and all(map(_goes_on, wrong)):
        return (Cause.window_misplaced,)
    return causes


def _goes_on(one: Weighed) -> bool:
    """Whether a micro-batch of fewer rows, which ends the data, is followed by others."""
    return len({*one.rows}) == 2 and one.rows[-1] == max(one.rows)


def _words(reading: Reading, one: Weighed, usual: int) -> str:
    share = f"the loss terms of a window weigh {sum(one.parts):.4g}, with {one.num} micro-batches"
    of_times = {
        Cause.loss_not_divided: share if reading.form is Form.terms else f"the means of {one.num} micro-batches are added",
        Cause.loss_divided_twice: share,
        Cause.short_window_divided_by_n: f"a window of {one.num} micro-batches is divided by {usual}",
        Cause.replica_scale: f"the loss terms of all {one.world} ranks weigh {one.shares[0]:.4g}",
    }
    cause = reading.times.cause
    parts = [of_times[cause] if cause is not None else "", reading.divisor.words, reading.form.value]
    beside = f"beside a coefficient of {reading.coefficient:.4g}" if reading.coefficient != 1 else ""
    return ", and ".join(part for part in (*parts, beside) if part)


def _unnamed(seen: Sequence[Weighed], rivals: Sequence[Reading]) -> str:
    last = seen[-1]
    if not alike(last.shares, last.tolerance):
        return f"loss terms weigh {listed(last.shares)} of what they should over the micro-batches of a window"
    low, high = min(one.shares[0] for one in seen), max(one.shares[0] for one in seen)
    if not alike((low, high), 2e-2):
        return f"the terms of a window weigh {low:.4g} to {high:.4g} of their mean, and no known normalisation explains them"
    ways = dict.fromkeys(map(_short, rivals))
    either = f" ({', or '.join(ways)})" if len(ways) > 1 else ": a weight of the loss, or its unit"
    return f"all terms of a window weigh {high:.4g} of their mean, alike in every window{either}"


def _short(reading: Reading) -> str:
    if not reading.causes:
        return f"a coefficient of {reading.coefficient:.4g}"
    return " and ".join(cause.replace("_", " ") for cause in reading.causes)


def listed(numbers: Iterable[float]) -> str:
    """Put the first numbers on one line.

    Args:
        numbers: Any numbers.

    Returns:
        `1, 0.5, 2`, at most eight of them.
    """
    return ", ".join(f"{number:.3g}" for number in islice(numbers, 8))


def alike(numbers: Sequence[float], tolerance: float) -> bool:
    """Decide whether numbers are equal up to a tolerance.

    Args:
        numbers: The numbers.
        tolerance: The largest spread, relative to the largest absolute value.

    Returns:
        Whether max - min is within the tolerance.
    """
    largest = max(map(abs, numbers))
    return max(numbers) - min(numbers) <= tolerance * largest


def near(number: float, wanted: float, tolerance: float) -> bool:
    """Decide whether a number equals another up to a relative tolerance.

    Args:
        number: The number.
        wanted: The other, to which the tolerance is relative.
        tolerance: The tolerance.

    Returns:
        Whether |number - wanted| <= tolerance |wanted|.
    """
    return abs(number - wanted) <= tolerance * abs(wanted)
