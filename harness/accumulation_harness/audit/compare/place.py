"""The first module whose numbers differ although it was handed the same ones: where a difference begins, forward or backward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accumulation_harness.audit.evidence import FLOAT32, Array, ModuleCall, Run, overflow_is_expected
from accumulation_harness.compare.linear import distance, proportion
from accumulation_harness.system.enums import StrEnum

CLEAR = 30.0  # times what moving the weights by a rounding makes of the same numbers
LEAST = 100.0  # roundings of the arithmetic: sums over other numbers of rows round otherwise
Numbers = npt.NDArray[np.float64]
Arrays = Sequence[Array]
SLOPES = ("by_given", "by_gave")


class Where(StrEnum):
    """What differs first; {} is the module."""

    rows = "in what the loop gives the model"
    calls = "in how often {} is called"
    weights = "in the weights of {}: they have moved since the window began, or are no longer those of N=1"
    forward = "in the forward of {}: from the same inputs it computes other outputs"
    recomputation = "in {}: recomputed for the backward, its outputs differ from the forward's"
    loss = "in the loss: the model's outputs agree, and the loss has other gradients by them"
    backward = "in the backward of {}: from the same output gradients it computes other input gradients"
    parameters = "in the gradients of the parameters of {}: the outputs of all modules agree, and so do the gradients by them"
    after = "in no module: forwards and backwards agree, and the gradients are changed afterwards"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a difference begins."""

    where: Where
    path: str = ""  # of the module in its model; empty where it is none
    kind: str = ""  # its class
    operation: str = ""  # the first one in it that differs
    apart: float = 0.0  # relative distance of what differs
    floor: float = 0.0  # of it, which rounding explains
    micro_batch: int | None = None  # from 0, with the number that differs most
    row: int = 0  # of that micro-batch
    value: float = math.nan  # that number, and what it should be
    wanted: float = math.nan
    alike: tuple[int, ...] = ()  # micro-batches in which nothing differs
    formats: tuple[str, str] | None = None  # of what is given, and of what should be, where these differ

    def __str__(self) -> str:
        """What follows `the first difference is `."""
        said = self.where.format(f"`{self.path}`" + (f" ({self.kind})" if self.kind != self.path else ""))
        if self.operation:
            said += f"; the operation is {self.operation}"
        if self.apart:
            said += f", off by {self.apart:.2g} (rounding explains {self.floor:.1g})"
        if self.micro_batch is not None:
            digits = 4 + max(0, round(-math.log10(abs(self.value - self.wanted) / abs(self.wanted)))) if self.known else 4
            said += (
                f"; most in row {self.row + 1} of micro-batch {self.micro_batch + 1}: "
                f"{self.value:.{digits}g} instead of {self.wanted:.{digits}g}"
            )
        if self.alike:
            said += f"; not in micro-batch{'es' * (len(self.alike) > 1)} {', '.join(str(k + 1) for k in self.alike[:4])}"
        return said + (f"; in {self.formats[0]} instead of {self.formats[1]}" if self.formats else "")

    @property
    def known(self) -> bool:
        """Whether both numbers are some, and other ones."""
        return self.wanted != 0 and self.value != self.wanted and math.isfinite(self.value) and math.isfinite(self.wanted)


class Beside(NamedTuple):
    """A tensor of all micro-batches beside that of the reference's window, its rows in the same order."""

    own: Numbers
    other: Numbers
    axis: int  # of the rows
    sizes: tuple[int, ...]  # of each micro-batch along it
    block: int  # entries of a row along it
    floor: float  # relative distance that rounding explains

    @property
    def parts(self) -> list[tuple[Numbers, Numbers]]:
        """Of each micro-batch."""
        edges = np.cumsum(self.sizes)[:-1]
        return list(zip(np.split(self.own, edges, self.axis), np.split(self.other, edges, self.axis), strict=True))

    @property
    def is_off(self) -> bool:
        """Whether the two differ."""
        return distance(self.own, self.other) > self.floor

    def scaled(self, factors: Sequence[float]) -> Beside:
        """Beside the reference's, each micro-batch's times a factor."""
        other = [part * factor for (_, part), factor in zip(self.parts, factors, strict=True)]
        return self._replace(other=np.concatenate(other, self.axis))


@dataclass
class Called:
    """One call in the reference, beside the same one in every micro-batch, and at weights moved by a rounding."""

    own: Sequence[ModuleCall]
    other: ModuleCall
    null: ModuleCall
    order: Sequence[int]  # the reference's row that stands at each place of the micro-batches; empty where they stand alike
    around: Called | None
    least: float  # distance that is rounding in any case
    factors: Sequence[float] = ()  # of the slopes, by micro-batch

    def beside(self, mine: Sequence[Arrays], theirs: Arrays, moved: Arrays, *, slopes: bool = False) -> Iterator[Beside]:
        """Compare the micro-batches with the reference and the moved reference, tensor by tensor.

        Args:
            mine: For each micro-batch its tensors.
            theirs: The reference's tensors.
            moved: The tensors of the reference at weights moved by a rounding.
            slopes: Whether they are gradients, which are compared up to the factors of the micro-batches.

        Yields:
            Distance and floor of each tensor that can be compared.
        """
        for place, other in enumerate(theirs):
            own = [each[place] for each in mine if place < len(each)]
            null = moved[place] if place < len(moved) else None
            apart = distance(null, other) if null is not None and other is not None else 0.0
            floor = max(self.least, CLEAR * apart) if math.isfinite(apart) else math.inf
            found = _joined(own, other, self.order, floor) if len(own) == len(mine) else None
            if found is not None:
                yield found.scaled(self.factors) if slopes and self.factors else found

    @property
    def has_moved(self) -> bool:
        """Whether its own parameters are others than the reference's."""
        pairs = [pair for one in self.own for pair in zip(one.weights, self.other.weights, strict=False)]
        return any(abs(own - other) > self.least * max(own, other) for own, other in pairs)

    def each(self, what: str) -> Iterator[Beside]:
        """Of what it was `given` or `gave`, or of the slopes `by_gave`, which its backward was handed, and `by_given`."""
        own, other, null = [getattr(one, what) for one in self.own], getattr(self.other, what), getattr(self.null, what)
        return self.beside(own, other, null, slopes=what in SLOPES)

    def off(self, what: str) -> Beside | None:
        """The first tensor that is another one; None where none is known to be."""
        return next((one for one in self.each(what) if one.is_off), None)


@overflow_is_expected
def place_of(mine: Run, theirs: Run, null: Run, only: Sequence[str] = ()) -> Place | None:
    """Find where a run first differs from another.

    Args:
        mine: The candidate.
        theirs: The reference.
        null: The reference at weights moved by a rounding.
        only: Names of the tensors whose gradients differ, where others agree.

    Returns:
        Module, direction and operation; None where that is not known.
    """
    forwards, num = (1 + max((call.forward for call in run.calls), default=-1) for run in (theirs, mine))
    if not forwards or not num or num % forwards:
        return None
    found = _called(mine, theirs, null, num // forwards, forwards)
    if found is None or isinstance(found, Place):
        return found
    place = _forward(found) or _recomputed(found) or _backward(found, only)
    called = next((one for one in found if place is not None and one.other.path == place.path), None)
    return place if place is None or called is None else replace(place, operation=_operation(called, place.where))


def _by_key(run: Run) -> dict[tuple[int, str, int], ModuleCall]:
    """By outermost forward, path, and the number of the module's call in it, in the order in which they began."""
    times = Counter[tuple[int, str]]()
    found = {}
    for call in sorted(run.calls, key=lambda call: call.begun):
        found[call.forward, call.path, times[call.forward, call.path]] = call
        times[call.forward, call.path] += 1
    return found


def _called(mine: Run, theirs: Run, null: Run, num: int, forwards: int) -> list[Called] | Place | None:
    """The reference's calls, in the order in which they began; or the first one that is not made everywhere."""
    own, moved, least = _by_key(mine), _by_key(null), LEAST * theirs.roundoff  # of the arithmetic that is right
    found: dict[int, Called] = {}
    for key, other in _by_key(theirs).items():
        forward, path, number = key
        calls = [own[each] for k in range(num) if (each := (k * forwards + forward, path, number)) in own]
        if len(calls) < num:
            return Place(where=Where.calls, path=path, kind=other.kind)
        if key not in moved:
            return None
        around = None if other.parent is None else found[other.parent]
        order = _order([row for one in calls for row in one.rows], other.rows) if around is None else around.order
        found[other.begun] = Called(calls, other, moved[key], order, around, least or LEAST * FLOAT32)
    return list(found.values())


def _order(own: Sequence[str], other: Sequence[str]) -> Sequence[int]:
    """Of each of our rows its place in the reference's window; empty where they stand alike, or are not known one by one."""
    places = {row: place for place, row in enumerate(other)}
    known = len(places) == len(other) == len(own) and places.keys() == set(own)
    return [places[row] for row in own] if known and list(own) != list(other) else []


def _joined(own: Arrays, other: Array, order: Sequence[int], floor: float) -> Beside | None:
    """Joined along the one axis that makes up the reference's shape; None for what has no rows."""
    parts = [each for each in own if each is not None]
    if other is None or len(parts) < len(own) or any(part.ndim != other.ndim for part in parts):
        return None
    for axis in range(other.ndim):
        sizes = tuple(part.shape[axis] for part in parts)
        rest = {tuple(np.delete(part.shape, axis)) for part in (*parts, other)}
        if sum(sizes) == other.shape[axis] and len(rest) == 1:
            block, left = divmod(other.shape[axis], len(order) or other.shape[axis] or 1)
            if left:
                return None
            taken = (np.asarray(order, dtype=int)[:, None] * block + np.arange(block)).ravel()
            return Beside(
                np.concatenate(parts, axis), other.take(taken, axis) if len(order) else other, axis, sizes, block, floor
            )
    return None


def _forward(calls: Sequence[Called]) -> Place | None:
    """The innermost call that gives something else: the one that ends first, or the one around it that was handed the same."""
    for called in sorted(calls, key=lambda one: one.other.ended):
        off, around = called.off("gave"), called
        while off is not None:
            given = around.off("given")
            if given is None:
                return _at(Where.weights if around.has_moved else Where.forward, around.off("gave") or off, around)
            if around.around is None:
                return _at(Where.rows, given)
            around = around.around
    return None


def _recomputed(calls: Sequence[Called]) -> Place | None:
    """The innermost call that gives something else when it is computed again, and does not in the reference."""
    for called in sorted(calls, key=lambda one: one.other.ended):
        apart, usual = max(map(_apart_again, called.own)), _apart_again(called.other)
        if apart > called.least >= usual:
            path, kind = called.other.path, called.other.kind
            return Place(where=Where.recomputation, path=path, kind=kind, apart=apart, floor=called.least)
    return None


def _apart_again(call: ModuleCall) -> float:
    pairs = zip(call.again, call.gave, strict=False)
    return max((distance(a, b) for a, b in pairs if a is not None and b is not None), default=0.0)


def _backward(calls: Sequence[Called], only: Sequence[str]) -> Place | None:
    """The loss, where its slopes are not the reference's times a factor of the micro-batch; then from the last call on."""
    outermost = [called for called in calls if called.around is None]
    slopes = [one for called in outermost for one in called.each("by_gave")]
    if not slopes:
        return None
    factors = []
    for k in range(len(slopes[0].sizes)):
        own, other = (np.concatenate([one.parts[k][side].ravel() for one in slopes]) for side in (0, 1))
        factors.append(proportion(own, other)[0])
    for called in calls:
        called.factors = factors
    if (off := next(filter(None, (called.off("by_gave") for called in outermost)), None)) is not None:
        return _at(Where.loss, off)
    for called in reversed(calls):
        handed, off = [*called.each("by_gave")], called.off("by_given")
        if off is not None and handed and not any(one.is_off for one in handed):
            return _at(Where.backward, off, called)
    owners = {name.rpartition(".")[0] for name in only}
    owner = next((one.other for one in calls if owners == {one.other.path}), None)
    return Place(where=Where.after) if owner is None else Place(where=Where.parameters, path=owner.path, kind=owner.kind)


def _at(where: Where, off: Beside, called: Called | None = None) -> Place:
    """With the number that differs most."""
    apart = np.abs(off.own - off.other)
    index = np.unravel_index(int(np.argmax(np.where(np.isnan(apart), np.inf, apart))), apart.shape)
    along, edges = int(index[off.axis]), np.cumsum((0, *off.sizes))
    micro_batch = int(np.searchsorted(edges, along, side="right")) - 1
    more: Mapping[str, Any] = {}
    if called is not None:
        pairs = zip(called.own[micro_batch].formats, called.other.formats, strict=False) if where is Where.forward else ()
        formats = next((pair for pair in pairs if pair[0] != pair[1]), None)
        more = {"path": called.other.path, "kind": called.other.kind, "formats": formats}
    return Place(
        where=where,
        apart=distance(off.own, off.other),
        floor=off.floor,
        micro_batch=micro_batch,
        row=(along - int(edges[micro_batch])) // off.block,
        value=float(off.own[index]),
        wanted=float(off.other[index]),
        alike=tuple(k for k, (own, other) in enumerate(off.parts) if distance(own, other) <= off.floor),
        **more,
    )


def _operation(called: Called, where: Where) -> str:
    """The first operation of a forward, or node of a backward, that was handed the same and gives something else."""
    is_backward = where is Where.backward
    each = [call.nodes if is_backward else call.operations for call in (called.other, called.null, *called.own)]
    for other, null, *own in zip_longest(*each):
        if odd := [one for one in own if (one and one.name) != (other and other.name)]:
            extra = f"{odd[0]}, which the whole batch does without"
            return extra if other is None else f"{odd[0] or 'missing'}, where the whole batch has {other}"
        given = called.beside([one.given for one in own], other.given, null.given, slopes=is_backward)
        gave = called.beside([one.gave for one in own], other.gave, null.gave, slopes=is_backward)
        if not any(one.is_off for one in given) and any(one.is_off for one in gave):
            return str(other)
    return ""
