"""What a candidate's run shows beside the reference's, in plain numbers: all that the rules read.

Distances are relative to the reference's norm. A number that is not known is infinite, so that it is never within a gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, isinf, nan
from typing import Literal

from accumulation_harness.audit.compare.place import Place
from accumulation_harness.audit.evidence import Role
from accumulation_harness.compare.linear import WeightedSum

ON_THE_WAY = 1e-2  # share of a movement that does not lead towards the weights, below which it makes an average of them
Rows = Literal["same", "different", "unknown"]  # of a window, beside the reference's
Format = Literal["bfloat16", "float16"]
ALIKE = 1e-2  # relative; factors of rows that differ by less are one


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A vector a beside the reference's g."""

    distance: float  # ||a - g|| / ||g||
    scale: float  # ||a|| / ||g||
    cosine: float


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """The same rows in candidate and reference, at equal parameters."""

    outputs: float = inf  # largest relative distance of the model's output for a row
    outputs_of_first: float = inf  # of those in the window's first micro-batch
    residual: float  # largest relative distance of a row's slope from a multiple of the reference's
    factors: tuple[tuple[float, ...], ...]  # these multiples, per micro-batch; 0 or infinite: the row counts in one run only
    tokens: bool = False  # whether residual and factors are of the positions of a row, since rows are no multiples

    @property
    def what(self) -> str:
        """What `factors` are of."""
        return "token" if self.tokens else "row"

    @property
    def chosen(self) -> bool:
        """Whether some rows count in one of the two runs only; not all tokens of a micro-batch, whose deviations may be 0."""
        parts = [part for part in self.factors if any(part)] if self.tokens else self.factors
        return any(f == 0 or isinf(f) for part in parts for f in part)

    @property
    def alike_where_chosen(self) -> bool:
        """Whether those that count in both runs do so alike in each micro-batch: they were chosen, and not weighed otherwise."""
        counting = [[f for f in part if f and not isinf(f)] for part in self.factors]
        return all(max(part) - min(part) <= ALIKE * max(map(abs, part)) for part in counting if part)

    @property
    def spread(self) -> float:
        """Largest difference of two rows' factors within one micro-batch, relative to the largest factor."""
        if any(isinf(f) for part in self.factors for f in part):
            return inf
        size = max((abs(f) for part in self.factors for f in part), default=0.0)
        return max((max(part) - min(part) for part in self.factors), default=0.0) / size if size else 0.0


@dataclass(frozen=True, kw_only=True)
class OneTerm:
    """What one addend of the loss gave to the candidate's gradient, beside what it gave to the reference's."""

    distance: float  # relative to the whole reference gradient
    scale: float  # of the candidate's along the reference's
    parts: WeightedSum  # of the reference's on those of the micro-batches; residual relative to the whole reference gradient
    micro_batches: int  # of the probed window, also those without it
    by_row: RowFacts | None = None  # outputs are not looked at


@dataclass(frozen=True, kw_only=True)
class TermFacts:
    """The reference gradient as a sum of what each addend of the loss gave to the candidate's."""

    parts: WeightedSum  # one part per addend
    each: tuple[OneTerm, ...] = ()  # the addends one by one, where both losses have the same number of them


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What extra runs have shown of a window that differs; nothing before they were made."""

    made: bool = False  # whether rows and couplings have been looked at
    by_row: RowFacts | None = None
    by_term: TermFacts | None = None  # only where the loss is a sum
    mixed: bool = False  # in the reference, the model's output for one row depends on other rows
    coupled: bool = False  # at N=1, a row's loss depends on the outputs of a row that is in another micro-batch here
    elementwise: bool = False  # at N=1, the slope by an element of an output depends on that element alone
    place: Place | None = None  # where the difference begins, module by module
    agrees_when_frozen: bool = False  # the difference is gone when the parameters stay where they are
    held: tuple[str, ...] = ()  # paths of what the next micro-batch found as the window's first one did, in a further run
    is_bank: bool = False  # whether some of that is replaced in part, and the rest of it stays
    agrees_when_held: bool = False  # the difference is gone then
    draws_count: bool = True  # whether other random numbers give another gradient at N=1, as far as that is known
    same_at_one: bool = False  # the comparison is with an independent function, and N=1 differs from it as well


@dataclass(frozen=True, kw_only=True)
class Update:
    """What the optimizer made of its gradient, beside the reference's; gates are what rounding explains."""

    distance: float = 0.0  # of the movements of the parameters, in the tensor that is farthest beyond its gate
    gate: float = inf
    only: tuple[str, ...] = ()  # the tensors that move otherwise, where others agree
    known: float = 1.0  # share of the elements whose movement rounding does not decide
    along_weights: float = nan  # residual of the difference of movements outside the direction of the parameters
    state_distance: float = 0.0
    state_gate: float = inf

    @property
    def agrees(self) -> bool:
        """Whether movement and state are within their gates."""
        return self.distance <= self.gate and self.state_distance <= self.state_gate


@dataclass(frozen=True)
class Apart:
    """Something that is held in numbers, by its path, and that moves otherwise than in the reference."""

    path: str
    window: int  # at whose beginning it is otherwise first
    distance: float  # relative to how far the reference's has moved
    gate: float
    role: Role | None  # of what it belongs to
    share: float  # of the way to some weights that its movements in the reference go at least; 0 where they lead elsewhere
    number: tuple[float, float] | None  # here and in the reference, where it is one
    times: float  # by which a number moves further than in the reference; 0 where unknown
    size: int  # numbers in it
    plain: bool  # whether it is a number of Python's
    ends: bool  # whether it is otherwise at the end as well
    kept: bool  # whether it goes on from what it was, as a run with another value in its place has shown, and ends otherwise

    def __str__(self) -> str:
        """`schedule.last_epoch is 16 instead of 4`."""
        if self.number is None:
            return f"`{self.path}` " + (f"is off by {self.distance:.2g} of its movement" if isfinite(self.distance) else "moves")
        return f"`{self.path}` is {self.number[0]:g} instead of {self.number[1]:g}"

    @property
    def average(self) -> bool:
        """Whether it is an average of weights."""
        return 0 < self.share < 1 - ON_THE_WAY

    @property
    def copy(self) -> bool:
        """Whether it is a copy of weights, and stays one while these move on."""
        return self.kept and self.is_copied

    @property
    def is_copied(self) -> bool:
        """Whether weights are copied into it, in every window or now and then."""
        return self.share >= 1 - ON_THE_WAY

    @property
    def of_loop(self) -> bool:
        """Whether it is a tensor that the loop itself keeps, and no weights."""
        return self.kept and self.role is None and not self.share

    @property
    def may_be_kept(self) -> bool:
        """Whether it is a tensor that could be a state: of a model, trained by hand, or of the loop's own."""
        return self.of_model or self.role == "trained" or (self.role is None and self.number is None and not self.average)

    @property
    def of_model(self) -> bool:
        """Whether it is a tensor that a model holds besides its weights."""
        return self.role == "model" and not (self.plain or self.average or self.copy)
