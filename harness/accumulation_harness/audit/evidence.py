"""What one run of a training function showed: plain numbers and NumPy vectors, no torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from accumulation_harness.judge.cause import Cause

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]
Change = tuple[Vector, Vector]  # [P] before and after
SUMMED = 2**10  # elements of a signed sum
HELD = 2**10  # elements kept of a tensor as a window begins
KEPT = 4  # windows whose contributions are kept: the first ones, as many with another number of backwards, and those asked for
SHORT = (8, 11)  # binary digits of a number in bfloat16 and in float16
LAST_DIGIT = 0.4  # share of rounded numbers that have a last digit of 1: a half, but for chance
FEWEST_ROUNDED = 8  # numbers that are short by chance
FEW_SEEN, ANCHORS = 64, 2  # numbers that are asked for a factor, of which so many are tried as whole ones
FEW_ROUNDINGS = 2.0**-21  # relative; what taking out a factor leaves in float32
FLOAT32 = 2.0**-24  # unit roundoff: half the distance from 1 to the next number
overflow_is_expected = np.errstate(invalid="ignore", over="ignore")  # watched runs overflow, and are told about it elsewhere


def norms_by(counts: Sequence[int], values: Vector) -> Vector:
    """Compute the norm of each tensor that a concatenated vector is made of.

    Args:
        counts: Number of elements of each tensor.
        values: [P] the tensors, flattened and concatenated.

    Returns:
        [tensors] the norms.
    """
    sizes = np.asarray(counts, dtype=np.int64)
    found, filled = np.zeros(len(sizes)), sizes > 0
    if filled.any():
        starts = (np.cumsum(sizes) - sizes)[filled]
        found[filled] = np.sqrt(np.add.reduceat(values * values, starts))
    return found


def rounded_to(counts: Sequence[int], values: Vector) -> float:
    """Find the 16-bit format that numbers have been rounded to, whatever format they are kept in.

    All elements of a tensor then have at most p binary digits, and half of them a last digit of 1, which counts have not.

    Args:
        counts: Number of elements of each tensor.
        values: [P] the tensors, flattened and concatenated.

    Returns:
        The unit roundoff 2^-p of the format that most of the elements are in; 0 where there is none.
    """
    whole = np.ldexp(np.abs(np.frexp(np.where(np.isfinite(values), values, 0.0))[0]), 53).astype(np.int64)
    digits = np.where(whole > 0, 53 - np.log2(np.maximum(whole & -whole, 1)), 0.0)
    tensors = [each[each > 0] for each in np.split(digits, np.cumsum(counts)[:-1])]
    for p in SHORT:
        rounded = sum(each.size for each in tensors if each.size and each.max() <= p and (each == p).mean() >= LAST_DIGIT)
        if rounded >= FEWEST_ROUNDED and 2 * rounded > np.count_nonzero(digits):
            return 2.0**-p
    return 0.0


def of_few_digits(values: Vector, p: int) -> Vector:
    """Take out one factor of all numbers, where half of them or more are numbers of p binary digits without it.

    A gradient that is rounded and then divided by a count has such a factor. It makes one of the numbers a whole one of p digits:
    2^(p - 1) factors are tried of each of a few numbers.

    Args:
        values: [P] numbers in float32 or finer.
        p: Digits.

    Returns:
        [P] the numbers times a factor, those of p digits rounded to them; the values themselves where there is no factor.
    """
    some = values[(values != 0) & np.isfinite(values)]
    sample = some[:: some.size // FEW_SEEN + 1]
    for anchor in sample[:: sample.size // ANCHORS + 1] if 2 * sample.size > FEW_SEEN else ():
        factors = np.arange(2.0 ** (p - 1), 2.0**p) / abs(anchor)
        fitting = _fits(np.outer(factors, sample), p).mean(axis=1)
        if fitting.max() >= LAST_DIGIT:
            scaled = values * factors[int(np.argmax(fitting))]
            return np.where(_fits(scaled, p), _rounded(scaled, p), scaled)
    return values


def _rounded(values: Vector, p: int) -> Vector:
    digits, exponents = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(np.ldexp(digits, p)), exponents - p))


def _fits(values: Vector, p: int) -> npt.NDArray[np.bool_]:
    return np.asarray(np.abs(values - _rounded(values, p)) <= FEW_ROUNDINGS * np.abs(values))


def emptied(before: Vector, after: Vector, counts: Sequence[int]) -> list[int]:
    """Return the indices of the tensors that are all zero now and were not before.

    Args:
        before: [P] the concatenated tensors before.
        after: [P] the same after.
        counts: Number of elements of each tensor.

    Returns:
        Indices into `counts`.
    """
    return np.flatnonzero((norms_by(counts, before) > 0) & (norms_by(counts, after) == 0)).tolist()


Start = Literal[
    "empty",  # no gradients
    "cleared",  # none, where an earlier backward of the window had left some
    "kept",  # those that the backward before had left
    "scaled",  # these times a number
    "changed",  # others
    "manual",  # unknown: this backward returned its gradient instead of adding it
]

Call = Literal["forward", "backward", "zero_grad", "load", "schedule", "clip", "unscale", "update scale", "step", "other step"]
Kind = Literal[
    "seen",  # wrong by itself: a call, a counter, a row, a movement of the parameters inside a window
    "predicted",  # the gradient is what the cause predicts
    "gradient",  # the gradient differs, and no prediction reproduces the whole of it
    "update",  # equal gradients, and another movement of the parameters or of the optimizer's state
    "schedule",  # the learning rates differ
    "average",  # an averaged copy of the weights differs
    "statistics",  # running statistics or other buffers of the model differ
    "report",  # what the function returned differs
    "layers",  # the difference is gone without a layer of the model
    "ranks",  # the ranks differ from each other
]


class Site(NamedTuple):
    """A line of the audited code that makes a call."""

    file: str
    line: int  # 0: of a notebook, which has none
    through: str = ""  # the package that makes the call for this line; empty where the line itself does


Layer = Literal["dropout", "batch_norm"]  # layers that couple samples, and that a run can do without


class Term(NamedTuple):
    """One addend of a loss."""

    name: str  # as autograd calls it
    gradient: Vector  # [P]
    coefficient: float  # by which the loss multiplies it, divisions by numbers included; NaN where that says nothing
    weight: float = math.nan  # the same, in any case
    path: str = ""  # the operations from the loss to it, with these numbers


@dataclass(frozen=True, kw_only=True)
class Backward:
    """One backward pass that reached the parameters of an optimizer."""

    loss: float = math.nan  # as differentiated, loss scale taken out; NaN when unknown
    scale: float = 1.0  # loss scale of a GradScaler, 1 without one
    start: Start  # the gradients it found
    emptied: frozenset[int] = frozenset()  # tensors whose gradients were cleared since the backward before
    contribution: Vector | None  # [P] its increment of .grad, loss scale taken out; None in windows that were not kept
    finite: bool  # whether all of it was
    rescaled: float = math.nan  # norm of the gradients it found, where somebody had scaled them since the backward before
    reached: frozenset[int] = frozenset()  # places of the optimizers whose parameters it reached
    bare: Vector | None = None  # [P] what autograd gave, where hooks on parameters made something else of it
    hooked: Change | None = None  # what they made of it: all elements, loss scale left in
    changed: tuple[Change, ...] = ()  # what became of the sum in `.grad` since the backward before: likewise
    terms: tuple[Term, ...] = ()  # the addends of its loss, if probed
    local: Vector | None = None  # [P] this rank's own gradient, before ranks are averaged; None on one rank
    locals: tuple[Vector, ...] = ()  # of all ranks, once pooled
    rows: tuple[str, ...] | None = None  # fingerprints of the rows of the forward before it; None when no module was called
    computed: bool = False  # whether rows were made from weights: other weights make other rows
    lengths: int = 0  # different lengths among these rows, padding left out
    forwards: int = 1  # training forwards since the backward before
    broken_forwards: int = 0  # of these, with non-finite input or output
    draws: bool = False  # whether random numbers were drawn inside a forward
    outside: bool = False  # whether random numbers were drawn since the step or backward before, but not inside a forward
    moved: Vector | None = None  # [P] movement of the parameters since the backward or step before, if any
    lrs: tuple[float, ...] = ()


def given_by(backwards: Sequence[Backward]) -> Vector | None:
    """Add up what these backwards gave; None where that was not kept of each.

    Args:
        backwards: Backwards of one window.

    Returns:
        [P] sum, or None.
    """
    parts = [b.contribution for b in backwards if b.contribution is not None]
    return np.asarray(np.sum(parts, axis=0)) if parts and len(parts) == len(backwards) else None


@dataclass(frozen=True, kw_only=True)
class Clip:
    """One call that clips gradients."""

    after: int  # backwards of the window before it
    before: Vector | None  # [P] gradients it was given, loss scale left in; of the first one where a window was not kept
    left: Vector | None  # [P] what it made of them; of the last one there
    active: bool
    limit: float
    scale: float  # loss scale still in the gradients: 1 when there is none or it has been taken out


class Whole(Protocol):
    """All elements of the tensors of which a run keeps a sample."""

    def put(self, tensors: Sequence[Any]) -> None:
        """Write them into tensors of the same sizes."""


Role = Literal[
    "weight",  # an optimizer holds it
    "trained",  # backwards give it gradients, and no optimizer holds it
    "model",
    "optimizer",
    "state",  # of an optimizer, by parameter: compared step by step
    "schedule",
    "function",  # a schedule made of one
    "scaler",
]


@dataclass(kw_only=True)
class Held:
    """What the audited code's variables led to in numbers, by path: `schedule.last_epoch`."""

    states: list[dict[str, Vector]] = field(default_factory=list)  # as windows begin, and at the end: what moved; samples of it
    fixed: dict[str, Vector] = field(default_factory=dict)  # numbers that never moved
    roles: dict[str, Role] = field(default_factory=dict)  # of the paths of what has one
    numbers: set[str] = field(default_factory=set)  # paths of numbers of Python's
    starts: list[dict[str, Vector]] = field(default_factory=list)  # as two micro-batches began, if they were looked at
    shaken: set[str] = field(default_factory=set)  # paths of what was given another value
    noted: list[dict[str, Vector]] = field(default_factory=list)  # whole, as each window began: what was asked for

    def settle(self) -> None:
        """Put aside the numbers that never moved, and leave out other vectors that did not."""
        first: dict[str, Vector] = {}
        for values in reversed(self.states):
            first |= values
        pairs = [(path, value) for values in self.states for path, value in values.items()]
        others = [(path, value) for path, value in pairs if value.tobytes() != first[path].tobytes()]  # few: that takes less time
        moved = {path for path, value in others if not np.array_equal(value, first[path], equal_nan=True)}
        self.fixed = {path: value for path, value in first.items() if path not in moved and value.size == 1}
        self.states = [{path: value for path, value in values.items() if path in moved} for values in self.states]

    def at(self, window: int, path: str) -> Vector | None:
        """What was there as a window began; None where nothing was, or is known of it."""
        values = self.states[window] if window < len(self.states) else {}
        return values.get(path, self.fixed.get(path))

    def role(self, path: str) -> Role | None:
        """Of the nearest object above a path that has one."""
        above = [own for own in self.roles if path == own or path.startswith((f"{own}.", f"{own}["))]
        return self.roles[max(above, key=len)] if above else None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, and the window before it. P: elements of all its tensors, or of a sample of a large model's."""

    tensors: tuple[tuple[str, int], ...]  # (name, number of elements) in the order of the vectors
    kept: tuple[int, ...] = ()  # elements of each tensor in the vectors; empty: all
    sums: Vector | None = None  # signed sums of all elements of the gradient, where the vectors are a sample
    gradient: Vector  # [P] as the optimizer left it
    total: Vector | None  # [P] sum of the window's contributions; None when there was no backward
    spreads: tuple[float, ...]  # ||sum_k |c_k||| of each tensor
    lrs: tuple[float, ...] = ()
    options: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # the groups' other numbers, which no step moves
    before: Vector  # [P] parameters
    after: Vector
    state: dict[str, Vector] = field(default_factory=dict)
    state_step: float | None = None
    moved: Vector | None = None  # [P] movement between the last backward (or step) and this step
    skipped: bool = False  # by a GradScaler, on non-finite gradients
    backwards: tuple[Backward, ...]
    clips: tuple[Clip, ...] = ()
    calls: tuple[Call, ...] = ()  # in the order of the window
    changed: tuple[Change, ...] = ()  # what became of the gradients since the last backward
    roundoffs: tuple[float, ...]  # of each tensor's format
    shards: tuple[tuple[int, ...], ...] = ()  # tensors of each rank, where the parts of all ranks were joined

    @property
    def rows(self) -> Counter[str] | None:
        """The rows of the window; None where they were not seen."""
        if any(b.rows is None for b in self.backwards) or not self.backwards:
            return None
        return Counter(row for b in self.backwards for row in b.rows or ())

    @property
    def num_rows(self) -> int:
        """Rows of the window; 0 where they were not seen."""
        return sum((self.rows or Counter()).values())

    @property
    def clip(self) -> Clip | None:
        """What all calls that clip its gradients did to them, where these are at the boundary (one for each group, say)."""
        if not self.clips or self.clips[0].before is None or any(one.after < len(self.backwards) for one in self.clips):
            return None
        return replace(self.clips[0], left=self.clips[-1].left)

    @property
    def unclipped(self) -> Vector:
        """[P] The gradients before they were clipped at the boundary; those taken where they were not, or elsewhere."""
        clip = self.clip
        return self.gradient if clip is None or clip.before is None else clip.before / clip.scale

    @property
    def movement(self) -> Vector:
        """[P] How far the step moved the parameters."""
        return self.after - self.before

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each tensor in the vectors."""
        return self.kept or tuple(count for _, count in self.tensors)

    def elements(self, chosen: Iterable[int]) -> npt.NDArray[np.int64]:
        """Where those of these tensors are in the vectors."""
        edges = np.cumsum([0, *self.counts])
        return np.concatenate([np.arange(edges[place], edges[place + 1]) for place in chosen])

    @property
    def forwards(self) -> int:
        """Most of a single backward."""
        return max((b.forwards for b in self.backwards), default=0)

    @property
    def moves(self) -> list[Vector]:
        """Movements of the parameters between the window's first backward and the step."""
        return [moved for moved in (*(b.moved for b in self.backwards[1:]), self.moved) if moved is not None]

    @property
    def clips_inside(self) -> int:
        """Times that clipping changed the gradients before the last backward."""
        return sum(clip.active and clip.after < len(self.backwards) for clip in self.clips)

    @property
    def calls_after(self) -> tuple[Call, ...]:
        """Those after the last backward."""
        return self.calls[max((place + 1 for place, call in enumerate(self.calls) if call == "backward"), default=0) :]

    @property
    def calls_inside(self) -> tuple[Call, ...]:
        """Those between the first backward and the last."""
        first = self.calls.index("backward") if "backward" in self.calls else 0
        return self.calls[first : len(self.calls) - len(self.calls_after)]

    @cached_property  # asked for again and again, of every step of a run that others follow
    def effective(self) -> bool:
        """Whether the step could move the parameters and did; a step at learning rate 0 counts."""
        return self.skipped or bool((self.after != self.before).any()) or not any(self.lrs) or not self.gradient.any()


@dataclass(kw_only=True)
class Track:
    """One optimizer."""

    name: str
    tensors: tuple[tuple[str, int], ...]  # those of the last step
    steps: list[Step] = field(default_factory=list)
    pending: list[Backward] = field(default_factory=list)  # after the last step
    moved_after: Vector | None = None  # [P] movement of the parameters after the last step, if any
    first_backward: int = 0  # their numbers in the run
    last_backward: int = 0
    resumed: tuple[tuple[int, int], ...] = ()  # (step, backwards lost) where another optimizer of the same tensors went on
    place: int = 0  # among the optimizers that were made, those that never step included
    start: Vector | None = None  # [P] parameters before the first forward; None for an optimizer made after it
    weights: list[Whole] = field(default_factory=list)  # before the first step and after each, where vectors are a sample


@dataclass(frozen=True)
class Row:
    """One row of a forward that a probe looked at."""

    micro_batch: int
    output: Vector
    slope: Matrix  # [positions, features] of the loss by the output, loss scale taken out
    computed: bool = False  # made from weights


Array = npt.NDArray[np.float64] | None  # a tensor in its own shape; None where it was not kept


class Operation(NamedTuple):
    """One operation inside a module, forward, or one node of its backward."""

    name: str
    given: Sequence[Array]  # the slopes that a node was handed; nothing of an operation
    gave: Sequence[Array]
    line: str = ""  # of the audited code, `model.py:12`

    def __str__(self) -> str:
        """`mul` (model.py:12)."""
        return f"`{self.name}`" + (f" ({self.line})" if self.line else "")


@dataclass(kw_only=True, eq=False)
class ModuleCall:
    """One call of a module in the window that was looked at module by module: its tensors in order, and slopes of the loss."""

    path: str  # in the model, `blocks.1.attention`; the class of an outermost module
    kind: str  # its class
    forward: int  # outermost forwards of the window before this one
    begun: int  # calls that began before it
    ended: int = -1  # calls that ended before it
    parent: int | None  # `begun` of the call around it
    rows: tuple[str, ...] = ()  # fingerprints of what an outermost one was given
    weights: tuple[float, ...]  # norms of its own parameters, without those of modules inside
    given: list[Array]
    by_given: list[Array] = field(default_factory=list)  # slopes, loss scale taken out
    gave: Sequence[Array] = ()
    by_gave: list[Array] = field(default_factory=list)
    again: Sequence[Array] = ()  # what it gave when it was computed again for a backward; empty where it was not
    formats: tuple[str, ...] = ()  # of what it gave
    operations: Sequence[Operation] = ()  # of the one module that is looked at operation by operation, in their order
    nodes: list[Operation] = field(default_factory=list)  # of its backward, from what it gave on


@dataclass(kw_only=True)
class Run:
    """One call of a training function."""

    batch_size: int
    accumulation_steps: int
    tracks: list[Track] = field(default_factory=list)
    beside: list[Track] = field(default_factory=list)  # as hooks saw an optimizer that was handed over: followed, not compared
    reported: tuple[float, ...] | None = None  # losses the function returned
    counts: dict[str, float] = field(default_factory=dict)  # steps, samples, tokens it returned
    error: str | None = None
    stopped: bool = False  # after as many optimizer steps as were asked for
    roundoff: float = 0.0  # of the coarsest arithmetic seen (autocast, 16-bit parameters)
    arithmetic: float = 0.0  # of that which no format of an optimizer's own tensors shows (autocast, copies, casts of the loop's)
    dropout_calls: int = 0
    norm_calls: int = 0
    forwards: int = 0
    backwards: int = 0
    summed: bool = False  # whether the loss of some backward was a sum of terms
    float16: bool = False  # whether a loss, a forward or a parameter was in float16
    coupled: frozenset[tuple[str, str]] = frozenset()  # rows whose loss depends on each other's outputs; only after a probe
    elementwise: bool = False  # whether the loss couples no element of an output to another; only known after a probe
    coupled_copies: int = 0  # rows whose cached copies bend the slope of another; only after a probe
    mixes_rows: bool = False  # whether the model's output for one row depends on another; only known after a probe
    probed: dict[str, Row] = field(default_factory=dict)  # by fingerprint; rows that came twice are left out
    term_slopes: list[list[dict[tuple[int, str], Matrix]]] = field(
        default_factory=list
    )  # of each addend by (output, row), likewise
    calls: list[ModuleCall] = field(default_factory=list)  # of the window that was looked at module by module
    dropped: int = 0  # rows of an epoch that a loader leaves out, as they fill no batch
    sites: dict[Call, Counter[Site]] = field(default_factory=dict)  # how often which lines made the loop's calls
    callers: tuple[str, ...] = ()  # packages whose code called the first backward, innermost first
    ranks: int = 1
    held: Held = field(default_factory=Held)
    copies: bool = False  # no optimizer holds the model's own parameters: they hold copies of them, or of a part
    sharded: bool = False  # each rank's optimizer holds a part of the weights, in plain tensors (FSDP1)
    parts: tuple[tuple[int, ...], ...] = ()  # ranks that hold one part each, where they started from different weights
    rank_distances: tuple[float, ...] = ()  # per optimizer step, between the gradients of the ranks

    def round_by(self, roundoff: float) -> None:
        """Operations are rounded so, whatever the format of the tensors."""
        self.roundoff = max(self.roundoff, roundoff)
        self.arithmetic = max(self.arithmetic, roundoff)

    @property
    def steps(self) -> list[Step]:
        """Of all optimizers."""
        return [step for track in self.tracks for step in track.steps]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the optimizer that took most."""
        return max((len(track.steps) for track in self.tracks), default=0)


class Location(NamedTuple):
    """Where a finding is looked for first."""

    site: Site
    call: Call
    text: str  # the line as it is written; empty where it cannot be read


@dataclass(frozen=True)
class Finding:
    """One thing that accumulation changed, with the evidence for it."""

    accumulation_steps: int
    optimizer_step: int | None  # the first one, from 0; None when it concerns the whole run
    cause: Cause
    evidence: Mapping[str, Any]  # for the reader; nothing is decided by it
    message: str
    kind: Kind
    track: str | None = None  # name of the optimizer; None when it concerns all of them
    steps: tuple[int, ...] = ()  # all optimizer steps it was seen at
    location: Location | None = None
    alone: bool = False  # without the layers that it and its like are about, all was compared, and agreed

    @property
    def since(self) -> str:
        """The optimizer step from which it was seen, as words to go on with; empty where it concerns the whole run."""
        return "" if self.optimizer_step is None else f", from optimizer step {self.optimizer_step}"

    @property
    def site(self) -> Site | None:
        """The line of the user's call; None where it is not known, as in a notebook."""
        return self.location.site if self.location is not None and self.location.site.line else None

    @property
    def is_named(self) -> bool:
        """Whether it has a cause."""
        return self.cause is not Cause.unexplained

    @property
    def nameless(self) -> bool:
        """Whether a gradient differs, and no cause says how."""
        return not self.is_named and self.kind == "gradient"

    @property
    def unreproduced(self) -> bool:
        """Whether a gradient or a learning rate differs in a way that no cause's prediction reproduces."""
        return self.kind == "gradient" or (self.kind == "schedule" and not self.is_named)


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """Nothing is changed by default: the function is only watched."""

    perturb: float = 0.0  # move every parameter by so many of its own roundings, with alternating signs, before each window
    arithmetic: float = 0.0  # with `perturb`: a rounding is no less than this
    rounded_once: bool = False  # every operation in float32 is done in double precision, and its result rounded
    leads: bool = False  # other runs will follow this one: its weights are kept after every step
    follow: Run | None = None  # after step t, put the parameters this run had after step t: steps compare one by one
    each: tuple[int, ...] = ()  # its steps up to each one of the followed run's: what micro-batches give on their own
    freeze_weights: bool = False  # put the starting parameters back after every step: a cached forward then has the right ones
    redraw: int | None = None  # window before which every generator draws a number more
    note: frozenset[str] = frozenset()  # paths of what is kept whole as windows begin
    hold: frozenset[str] = frozenset()  # paths of what every micro-batch finds as its window began
    hold_as: Held | None = None  # in this run, where it is known
    starts: int | None = None  # window whose first two micro-batches are looked at as they begin
    shake: frozenset[str] = frozenset()  # paths of tensors that the second window, or that micro-batch, finds otherwise than left
    leaves: int | None = None  # window whose first micro-batch meets other weights: what the later ones give tells what it leaves
    keep: frozenset[int] = frozenset()  # windows whose contributions are kept, besides the usual ones
    terms: int | None = None  # window whose loss is taken apart into its addends, each differentiated alone
    probe: int | None = None  # window whose outputs and slopes are kept by row, and whose loss is asked whether it couples rows
    place: int | None = None  # window whose modules' inputs, outputs and slopes are kept
    inside: str | None = None  # path of a module of which every operation is kept there
    disable: frozenset[Layer] = frozenset()  # no dropout; running statistics instead of the batch's

    def led(self, steps: int) -> int:
        """How many steps the followed run has taken where this one has taken so many."""
        return bisect_right(self.each, steps) if self.each else steps


WATCH = Intervention()
SPECIAL = {  # attribute of an intervention -> what a run with it does
    "perturb": "weights moved by a rounding",
    "rounded_once": "operations in double precision",
    "follow": "on the weights of N=1",
    "each": "its micro-batches one by one",
    "shake": "other values in buffers",
    "leaves": "other weights in a first micro-batch",
    "freeze_weights": "weights put back after every step",
    "redraw": "other random numbers",
    "starts": "what micro-batches begin with",
    "note": "what windows begin with",
    "hold": "what is kept put back for every micro-batch",
    "probe": "its loss taken apart by rows and terms",
    "terms": "its loss taken apart by terms",
    "place": "module by module",
    "inside": "operation by operation",
    "disable": "without layers that couple samples",
}


def special(what: Intervention) -> tuple[str, ...]:
    """What is special about a run, in words; nothing of one that is only watched.

    Args:
        what: How a run is disturbed.

    Returns:
        Phrases, one for each field that is not as in a watched run.
    """
    return tuple(words for name, words in SPECIAL.items() if getattr(what, name) != getattr(WATCH, name))
