"""What two runs held in numbers as each window began, beside each other by path: shapes and names are nobody's guess.

What moved otherwise and goes on from what it was is `different` where it is an average or a copy of the weights, is trained by
hand or has the weights' sizes, and cannot be judged where it is any other tensor of the loop's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from accumulation_harness.audit.compare.floors import LEAST, beyond_rounding
from accumulation_harness.audit.evidence import Held, Role, Run, Vector
from accumulation_harness.compare.linear import distance, norm, proportion

FEWEST = 4  # elements below which a number lies between two others by chance
SAME = 1e-6  # of its size, below which a number is the same: a sum in float32
SCHEDULES = ("schedule", "function")  # roles
ON_THE_WAY = 1e-2  # share of a movement that does not lead towards the weights, below which it makes an average of them


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
            return f"`{self.path}` " + (
                f"is off by {self.distance:.2g} of its movement" if math.isfinite(self.distance) else "moves"
            )
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


def apart(mine: Held, theirs: Held, nulls: Sequence[Held], kept: Mapping[str, bool | None]) -> tuple[Apart, ...]:
    """Find what moved differently than in the reference and in its controls.

    What does not go on from what it was is written anew in every window, and what a run has not, or of another size, belongs
    to a micro-batch.

    Args:
        mine: What the candidate held.
        theirs: What the reference held.
        nulls: What runs held that differ from the reference by rounding.
        kept: Path -> whether the value goes on from what it was; None if unknown.

    Returns:
        A difference for each such path.
    """
    paths = dict.fromkeys(path for held in (theirs, mine) for values in held.states for path in values)
    found = [_apart(path, mine, theirs, nulls) for path in paths if kept.get(path) is not False]
    return tuple(replace(one, kept=one.ends and kept.get(one.path) is True) for one in found if one is not None)


def rests(path: str, held: Held) -> bool:
    """Whether it stays as it is from one window to the next, somewhere: as a copy does that is not taken in each.

    Args:
        path: Path of the value in the loop's state.
        held: What a run kept.

    Returns:
        True where two windows begin with the same value.
    """
    values = [held.at(window, path) for window in range(len(held.states))]
    return any(a is not None and b is not None and np.array_equal(a, b) for a, b in pairwise(values))


def _apart(path: str, mine: Held, theirs: Held, nulls: Sequence[Held]) -> Apart | None:
    role = theirs.role(path)
    if role == "weight" or (role == "state" and (first := theirs.at(0, path)) is not None and first.size > 1):
        return None  # compared step by step
    begun: tuple[Vector, Vector] | None = None
    found: Apart | None = None
    for window in range(min(len(mine.states), len(theirs.states))):
        a, b = mine.at(window, path), theirs.at(window, path)
        others = [null.at(window, path) for null in nulls if window < len(null.states)]
        if a is None or b is None or any(other is None or other.shape != b.shape for other in others) or a.shape != b.shape:
            begun = None
            continue
        if begun is None or begun[0].shape != a.shape or begun[1].shape != b.shape:
            begun = a, b
            continue
        moved = b - begun[1]
        distance = _relative(a - begun[0] - moved, moved, b)
        gate = beyond_rounding([_relative(other - b, moved, b) for other in others if other is not None])
        if found is not None:
            found = replace(found, ends=distance > gate)
        elif distance > gate:
            number = (float(a[0]), float(b[0])) if a.size == 1 else None
            share = _share(path, mine if math.isinf(distance) else theirs) if b.size >= FEWEST else 0.0
            counts = path in theirs.numbers and _counts(path, mine, theirs)
            plain = path in theirs.numbers
            found = Apart(path, window, distance, gate, role, share, number, counts, b.size, plain, ends=True, kept=False)
    return found


def _relative(difference: Vector, moved: Vector, value: Vector) -> float:
    size, way = norm(difference), norm(moved)
    if not math.isfinite(size) or size <= SAME * norm(value):
        return 0.0
    return size / way if way else math.inf


def _share(path: str, held: Held) -> float:
    """Of the way to some weights, what each of its movements goes at least; 0 where one leads elsewhere, or there is none."""
    windows = range(len(held.states))
    values = [held.at(window, path) for window in windows]
    weights = [[held.at(window, own) for window in windows] for own, role in held.roles.items() if role == "weight"]
    return max((_followed(values, own) for own in [*weights, [_joined(at) for at in zip(*weights, strict=True)]]), default=0.0)


def _joined(weights: Sequence[Vector | None]) -> Vector | None:
    """All in one vector."""
    known = [w for w in weights if w is not None]
    return np.concatenate(known) if known and len(known) == len(weights) else None


def _followed(values: Sequence[Vector | None], weights: Sequence[Vector | None]) -> float:
    """The least part of the way to the weights that a movement goes: an average may begin with a copy."""
    parts = []
    for window in range(1, len(values)):
        now, before = values[window], values[window - 1]
        if now is None or before is None or now.shape != before.shape:
            continue
        if norm(now - before) <= SAME * norm(now):
            continue  # an average of weights that have not moved yet
        ways = [w - before for w in weights[window - 1 : window + 1] if w is not None and w.shape == before.shape]
        parts.append(max((_part(now - before, way) for way in ways), default=0.0))
    return min(parts, default=0.0)


def _part(step: Vector, way: Vector) -> float:
    """The share of the way that a movement goes; 0 where it leads elsewhere."""
    part, off = proportion(step, way)
    return part if 0 < part <= 1 + ON_THE_WAY and off <= ON_THE_WAY else 0.0


def _counts(path: str, mine: Held, theirs: Held) -> float:
    """By how many times a number moves further than in the reference, from the first window to the last; 0 where unknown."""
    last = min(len(mine.states), len(theirs.states)) - 1
    ends = [held.at(window, path) for held in (mine, theirs) for window in (0, last)]
    a, b, c, d = ends
    if a is None or b is None or c is None or d is None or not d[0] - c[0]:
        return 0.0
    return float((b[0] - a[0]) / (d[0] - c[0]))


def numbers(mine: Held, theirs: Held, window: int) -> dict[str, tuple[float, float]]:
    """What was one number as a window began, here and in the reference, by its path.

    Args:
        mine: What the accumulated run kept.
        theirs: What the reference kept.
        window: Which window.

    Returns:
        Path -> number here, number in the reference.
    """
    own = {**mine.fixed, **(mine.states[window] if window < len(mine.states) else {})}
    pairs = [(path, value, theirs.at(window, path)) for path, value in own.items()]
    return {path: (float(a[0]), float(b[0])) for path, a, b in pairs if b is not None and a.size == b.size == 1}


def laid_out(mine: Held, theirs: Held) -> tuple[tuple[str, float, float], ...]:
    """The numbers of the schedules that never move and are not the reference's: path, number, and the reference's.

    Args:
        mine: What the accumulated run kept.
        theirs: What the reference kept.

    Returns:
        Path, number, and the reference's number.
    """
    own, usual = _keyed(mine), _keyed(theirs)
    keys = [
        (path, float(a), float(b))
        for path, wanted in usual.items()
        if len(own.get(path, ())) == len(wanted)
        for a, b in zip(own[path], wanted, strict=True)
    ]
    return tuple((path, a, b) for path, a, b in [*_of_schedules(mine, theirs), *keys] if a != b and not math.isnan(a))


def _keyed(held: Held) -> dict[str, list[int]]:
    """Of the mappings of schedules whose keys are whole numbers, these (milestones)."""
    found: dict[str, list[int]] = {}
    for path in held.fixed:
        at, _, key = path.removesuffix("]").rpartition("[")
        if key.isdecimal() and held.role(path) in SCHEDULES:
            found.setdefault(at, []).append(int(key))
    return {at: sorted(keys) for at, keys in found.items()}


def laid_out_alike(mine: Held, theirs: Held) -> tuple[float, ...]:
    """The whole numbers of the schedules that never move and are the reference's.

    Args:
        mine: What the accumulated run kept.
        theirs: What the reference kept.

    Returns:
        The numbers, each once.
    """
    return tuple(dict.fromkeys(a for _, a, b in _of_schedules(mine, theirs) if a == b and a > 0 and a == round(a)))


def _of_schedules(mine: Held, theirs: Held) -> list[tuple[str, float, float]]:
    own = [path for path in theirs.fixed if theirs.role(path) in SCHEDULES and path in mine.fixed]
    return [(path, float(mine.fixed[path][0]), float(theirs.fixed[path][0])) for path in own]


SHAKEN = 2  # the window that begins after one has met other values


def keeps(path: str, shaken: Run, usual: Run) -> bool | None:
    """Decide whether something goes on from what it was: after another value in its place it is another.

    Where a gradient has felt the other values, so has all that is made anew in that window: the next one tells.

    Args:
        path: Where it is held.
        shaken: A run in which held values were changed.
        usual: The same run without that.

    Returns:
        True if it does, None if unknown.
    """
    a, b = (run.held.at(SHAKEN + feels(shaken, usual), path) for run in (shaken, usual))
    if path not in shaken.held.shaken or a is None or b is None or a.shape != b.shape:
        return None
    return _relative(a - b, b, b) > LEAST


def feels(shaken: Run, usual: Run, *, given: bool = False) -> bool:
    """Whether a step took another gradient after the other values; `given`: while what its backwards gave was as ever.

    Args:
        shaken: The run that found other values.
        usual: The run as it is.
        given: Whether the backwards must have given what they gave before.

    Returns:
        True where one did.
    """
    tracks = zip(shaken.tracks, usual.tracks, strict=False)
    return any(
        not distance(a.gradient, b.gradient) <= LEAST
        and not (given and (a.total is None or b.total is None or not distance(a.total, b.total) <= LEAST))
        for mine, theirs in tracks
        for a, b in zip(mine.steps[1:SHAKEN], theirs.steps[1:SHAKEN], strict=False)
    )


def moved_inside(usual: Held) -> frozenset[str]:
    """List what the second micro-batch of a window finds changed since the first, besides weights and optimizers.

    Args:
        usual: What a run kept.

    Returns:
        Paths.
    """
    first, second = usual.starts if len(usual.starts) == 2 else ({}, {})
    moved = (path for path, value in first.items() if path in second and not np.array_equal(value, second[path], equal_nan=True))
    return frozenset(path for path in moved if first[path].shape == second[path].shape and usual.role(path) in OWN)


OWN = (None, "model", "trained")  # roles of what a loop or a model may keep


def carried(shaken: Held, usual: Held) -> dict[str, bool]:
    """What one micro-batch leaves to the next; whether a part of it is new and the rest as it was, as in a queue.

    Args:
        shaken: What the run with other values kept.
        usual: What a run kept.

    Returns:
        Path -> whether only a part of it is new.
    """
    found: dict[str, bool] = {}
    for path in moved_inside(usual):
        a, b = (held.starts[1].get(path) if len(held.starts) == 2 else None for held in (shaken, usual))
        if path in shaken.shaken and a is not None and b is not None and a.shape == b.shape:
            felt = np.abs(a - b) > LEAST * np.abs(b)
            found |= {path: not felt.all()} if felt.any() else {}
    return found
