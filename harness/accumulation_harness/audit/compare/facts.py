"""What a candidate's run shows beside the reference's, in plain numbers: all that the rules read.

Distances are relative to the reference's norm. A number that is not known is infinite, so that it is never within a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isinf, nan
from typing import Literal

from accumulation_harness.audit.evidence import Role

Rows = Literal["same", "different", "unknown"]  # of a window, beside the reference's
Format = Literal["bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A vector a beside the reference's g."""

    distance: float  # ||a - g|| / ||g||
    scale: float  # ||a|| / ||g||
    cosine: float


@dataclass(frozen=True, kw_only=True)
class Fits:
    """Relative distance of what was seen, a, from what a fault predicts of the reference gradient g; infinite where not known.

    N: accumulation steps; K: backwards of this window; s: the sum of what they gave.
    """

    times_n: float = inf  # N g
    times_k: float = inf  # K g
    squared: float = inf  # N^2 g
    over_n: float = inf  # g / N
    over_k: float = inf  # g / K
    k_over_n: float = inf  # g K / N
    times_rows: float = inf  # g times the rows of the window
    over_rows: float = inf
    times_ranks: float = inf  # g times the number of ranks
    over_ranks: float = inf
    line: float = inf  # a positive multiple of g
    along_weights: float = inf  # a - g along the parameters
    along_signs: float = inf  # a - g along their signs
    sum: float = inf  # s is g
    sum_over_n: float = inf  # s / N is g
    sum_over_k: float = inf
    sum_times_n: float = inf
    sum_line: float = inf  # a is a positive multiple of s
    own_sum: float = inf  # a is s
    sums: float = inf  # s is the reference's own s
    sums_line: float = inf  # a positive multiple of that
    stale: float = inf  # a is s and the gradient of the step before
    clipped_then_divided: float = inf  # the clipped sum, divided by N afterwards
    first: float = inf  # a positive multiple of what the first backward gave
    last: float = inf
    since_clear: float = inf  # of what the backwards gave since each tensor's gradient was cleared
    without_foreign: float = inf  # s without the backwards that reached other optimizers as well is g
    clamped: float = inf  # the sum of what the backwards gave, clamped to some value after each; where a is not s
    clamped_parts: float = inf  # the sum of what they gave, each clamped to some value

    @property
    def scaled_sum(self) -> float:
        """s is g, up to a factor of the number of micro-batches."""
        return min(self.sum, self.sum_over_n, self.sum_over_k, self.sum_times_n)


@dataclass(frozen=True, kw_only=True)
class WeightedSum:
    """A gradient as a sum of parts."""

    weights: tuple[float, ...] = ()  # per part; 1: as in their plain sum
    residual: float = inf  # of it outside their span
    condition: float = inf  # of the parts at unit length; the weights mean nothing when it is huge
    as_added: float = 1.0  # times the weights: what they were before sums were shortened, at N=1 or in the candidate
    sizes: tuple[float, ...] = ()  # norms of the parts


@dataclass(frozen=True, kw_only=True)
class RankSum:
    """The reference gradient as a sum of what every rank's micro-batches gave."""

    weights: tuple[tuple[float, ...], ...] = ()  # per micro-batch and rank; right: 1
    residual: float = inf
    condition: float = inf


@dataclass(frozen=True, kw_only=True)
class Window:
    """The micro-batches of one optimizer step."""

    backwards: int
    reference_backwards: int
    rows: Rows
    forwards: int = 1  # most of a single backward
    reference_forwards: int = 1
    num_rows: int = 0  # 0 when unknown
    rows_each: tuple[int, ...] = ()  # of the backwards that gave something; 0 when unknown
    kept: bool = True  # whether the contributions of the window were kept
    drawn_inside: bool = False  # random numbers were drawn inside a forward
    drawn_outside: bool = False  # or between two events, but not inside a forward
    drawn_between: bool = False  # or so before every backward but the first
    without_terms: int = 0  # backwards that gave nothing at all
    other_steps: int = 0  # of other optimizers, between its first forward and its last backward
    reference_other_steps: int = 0
    moves: int = 0  # times the parameters moved between the backwards
    reference_moves: int = 0
    move_along_weights: float = nan  # cosine of that movement with the parameters
    moved_apart: float = 0.0  # how far they moved there, beside the reference's; relative to them
    apart_along_weights: float = nan  # cosine of that difference with the parameters
    before_along_weights: float = nan  # cosine of the next with the parameters that it is of
    moved_before: float = 0.0  # how far the parameters were moved since the step before, beside the reference's; relative to them


@dataclass(frozen=True, kw_only=True)
class Accumulator:
    """What happened to `.grad` in one window."""

    found_changed: bool = False  # the window began with gradients that no backward of this optimizer had left
    stale: bool = False  # it began with gradients, and they were not cleared
    cleared_inside: int = 0  # backwards before which gradients of the window, or of some tensors, had been cleared
    cleared_at_last: tuple[str, ...] = ()  # tensors whose gradients were cleared between the last backward and the step
    cleared_then_filled: bool = False  # cleared after the last backward, and the step has a gradient nevertheless
    loaded_inside: bool = False  # a checkpoint was loaded between the backwards


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Clipping and loss scaling in one window."""

    clipped: bool = False  # clipping at the boundary changed the gradients (of either arm)
    limits: tuple[float, float] = (nan, nan)  # of that clipping, here and in the reference; where it is one call in both
    clips_inside: int = 0  # times that clipping changed them before that
    reference_clips_inside: int = 0
    clips_scaled: bool = False  # clipped with the loss scale still in the gradients
    rescaled: tuple[float, ...] = ()  # norms after the gradients were scaled inside the window, and at the step
    loss_scales: int = 1  # different ones in the window
    unscaled_inside: int = 0  # times a GradScaler unscaled gradients before the last backward


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The arithmetic of one window."""

    roundoff: float = 0.0  # of the coarsest arithmetic in use
    float16: bool = False
    lost: float = 0.0  # share of the reference's elements that are exactly 0 here, above what rounding does
    narrow: Format | None = None  # every element of the accumulated gradient fits in it, unlike the reference's


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What the model does besides mapping rows to outputs."""

    dropout: bool = False
    batch_norm: bool = False
    buffers: tuple[str, ...] = ()  # that have moved otherwise than the reference's


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
    agrees_when_frozen: bool = False  # the difference is gone when the parameters stay where they are
    agrees_when_held: bool = False  # the difference is gone when a forward's buffers move once per window
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


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One optimizer step of a candidate beside the reference's."""

    accumulation_steps: int
    ranks: int = 1
    track: str  # name of the optimizer
    step: int  # from 0
    gate: float  # largest relative distance of gradients that rounding explains
    whole_gate: float = 0.0  # of all tensors together, where `gate` is of some
    consumed: Compared  # the gradients that the optimizer took
    raw: Compared  # the gradients before clipping
    window: Window
    accumulator: Accumulator = Accumulator()
    scaling: Scaling = Scaling()
    precision: Precision = Precision()
    layers: Layers = Layers()
    fits: Fits = Fits()
    parts: WeightedSum = WeightedSum()  # of the reference gradient on what the backwards gave: the right weights
    taken: WeightedSum = WeightedSum()  # of the gradient before clipping on the same: the weights they had in the step
    rescaled: float = nan  # what the step took, as a multiple of what the backwards gave; NaN where it is none
    given: float = nan  # ||s|| / ||reference's s||
    by_rank: RankSum = RankSum()
    only: tuple[str, ...] = ()  # the tensors that differ, where others are known to agree: all vectors are of these alone
    probe: Probe = Probe()
    update: Update = Update()
    tensors: Mapping[str, Compared] = field(default_factory=dict)  # gradients before clipping, by the tensor's name

    @property
    def gradients_agree(self) -> bool:
        """Before clipping as well: a fault that clipping hides is still one."""
        return self.consumed.distance <= self.gate and self.raw.distance <= self.gate

    @property
    def agrees(self) -> bool:
        """Whether gradients, movement and state are all within their gates."""
        return self.gradients_agree and self.update.agrees


@dataclass(frozen=True, kw_only=True)
class RunSeen:
    """One optimizer's run, of the candidate or of the reference; tuples have one entry per effective optimizer step."""

    steps: int
    idle_steps: int = 0  # optimizer steps that moved nothing
    backwards: tuple[int, ...]
    pending: int = 0  # backwards after the last step
    lrs: tuple[tuple[float, ...], ...]  # per parameter group
    schedule_calls: tuple[int, ...]
    state_steps: tuple[float | None, ...] = ()  # the optimizer's own counter
    losses: tuple[float, ...] = ()  # differentiated, summed over the window
    reported: tuple[float, ...] | None = None  # losses that the function returned
    counts: Mapping[str, float] = field(default_factory=dict)  # steps, samples, tokens that it returned
    skipped: tuple[int, ...] = ()  # steps that a GradScaler left out
    broken_windows: tuple[int, ...] = ()  # steps whose window had a non-finite forward or gradient


@dataclass(frozen=True)
class Apart:
    """Something that is held in numbers, by its path, and that moves otherwise than in the reference."""

    path: str
    window: int  # at whose beginning it is otherwise first
    distance: float  # relative to how far the reference's has moved
    gate: float
    role: Role | None  # of what it belongs to
    average: bool  # whether the reference's moves towards some weights, and nowhere else
    number: tuple[float, float] | None  # here and in the reference, where it is one
    times: float  # by which a number moves further than in the reference; 0 where unknown
    plain: bool  # whether it is a number of Python's

    def __str__(self) -> str:
        """`schedule.last_epoch is 16 instead of 4`."""
        if self.number is None:
            return f"{self.path} is off by {self.distance:.2g} of its movement"
        return f"{self.path} is {self.number[0]:g} instead of {self.number[1]:g}"

    @property
    def of_model(self) -> bool:
        """Whether it is a tensor that a model holds besides its weights."""
        return self.role == "model" and not self.plain and not self.average


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One optimizer's run of a candidate beside the reference's."""

    accumulation_steps: int
    track: str  # name of the optimizer
    mine: RunSeen
    reference: RunSeen
    windows: tuple[Rows, ...]  # per aligned step
    repeated: tuple[int, ...] = ()  # rows more often in the window than in the reference's run, per step
    never: int = 0  # rows of the reference's run that the candidate never saw
    foreign: int = 0  # rows of the candidate that the reference never saw
    lr_moves_inside: bool = False  # a learning rate changed between the backwards of a window
    lr_gates: tuple[float, ...] = ()  # per step, how far rounding moves the learning rates; 0 for those of a schedule
    apart: tuple[Apart, ...] = ()  # what else moved otherwise than in the reference
    laid_out: tuple[tuple[str, float, float], ...] = ()  # numbers of schedules that never move, and are not the reference's
    resumed: tuple[tuple[int, int], ...] = ()  # (step, backwards lost) where a new optimizer took over


@dataclass(frozen=True)
class Facts:
    """Everything said of one optimizer of one candidate."""

    run: RunFacts
    steps: tuple[StepFacts, ...]
