"""The evidence of several ranks as that of one run: replicas are compared with each other, parts of one model are joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, zip_longest
from typing import Any, TypeVar

import numpy as np

from accumulation_harness.audit.evidence import Backward, Clip, Finding, Run, Start, Step, Track, Vector, overflow_is_expected
from accumulation_harness.compare.linear import distance, dot, norm
from accumulation_harness.judge.cause import Cause

SAME_START = 1e-5  # relative; starting weights of a tensor that is found in another run
FIRST_TOLD: tuple[Start, ...] = ("changed", "cleared", "scaled", "manual", "kept", "empty")  # of parts that do not agree


Rules = Mapping[str, Callable[[list[Any]], Any]]  # field -> what several of it make
OF_RUNS: Rules = {
    "reported": lambda each: next((one for one in each if one is not None), None),
    "counts": lambda each: {key: value for one in reversed(each) for key, value in one.items()},
    "coupled": lambda each: frozenset().union(*each),
    **dict.fromkeys(("roundoff", "arithmetic"), max),
    **dict.fromkeys(("dropout_calls", "norm_calls"), sum),
    **dict.fromkeys(("float16", "summed", "stopped", "mixes_rows"), any),
}
R = TypeVar("R", Run, Step, Backward, Clip)


def _merged(several: Sequence[R], rules: Rules, /, **fields: Any) -> R:
    """The first of several, with what they make together."""
    return replace(several[0], **{name: rule([getattr(one, name) for one in several]) for name, rule in rules.items()}, **fields)


@overflow_is_expected
def pooled(runs: Sequence[Run], like: Run | None = None) -> Run:
    """Make one run of all ranks, with an error if any of them raised.

    Ranks that start from the same weights are replicas: the first one's evidence stands for all, with the rows of all. Others
    hold parts of one model (stages of a pipeline, shards), which are joined.

    Args:
        runs: A run of each rank.
        like: The run in whose order of tensors parts are joined.

    Returns:
        The run.
    """
    if len(runs) == 1:
        return runs[0]
    groups = holders(runs)
    held = [_of_replicas([runs[rank] for rank in group]) for group in groups]
    errors = [f"rank {rank}: {run.error}" for rank, run in enumerate(runs) if run.error is not None]
    if len({len(run.tracks) for run in held}) > 1:
        errors.append(f"the ranks have different numbers of optimizers: {', '.join(str(len(run.tracks)) for run in runs)}")
    run = held[0] if len(held) == 1 else _of_parts(held, groups, like)
    return replace(run, error="; ".join(errors) or None)


def holders(runs: Sequence[Run]) -> list[list[int]]:
    """The ranks, those together that hold the same: replicas. FSDP1 leaves every rank a part.

    Args:
        runs: One for each rank.

    Returns:
        Lists of ranks; one of several ranks is of replicas.
    """
    groups: list[list[int]] = []
    for rank, run in enumerate(runs):
        same = None if run.sharded else next((group for group in groups if _are_replicas(runs[group[0]], run)), None)
        if same is None:
            groups.append([rank])
        else:
            same.append(rank)
    return groups


def _are_replicas(a: Run, b: Run) -> bool:
    """Whether two ranks started from the same weights, or took the same gradient although they did not; true where unknown."""
    firsts = [[track.steps[0] for track in run.tracks if track.steps] for run in (a, b)]
    if not firsts[0] or not firsts[1]:
        return True
    if [step.tensors for step in firsts[0]] != [step.tensors for step in firsts[1]]:
        return False
    pairs = list(zip(*firsts, strict=True))
    same = all(np.array_equal(x.before, y.before, equal_nan=True) for x, y in pairs)
    return same or all(x.gradient.any() and np.array_equal(x.gradient, y.gradient) for x, y in pairs)


# -- replicas ---------------------------------------------------------------------------------------------------------


def _of_replicas(runs: Sequence[Run]) -> Run:
    first, distinct = runs[0], _with_own_rows(runs)
    tracks = []
    for index, track in enumerate(first.tracks):
        steps = []
        for t, step in enumerate(track.steps):
            others, readers = _same_step(runs[1:], index, t), _same_step(distinct, index, t)
            steps.append(_pooled_step(step, others, readers))
        tracks.append(replace(track, steps=steps))
    return replace(first, tracks=tracks, ranks=len(runs), rank_distances=_rank_distances(runs) if len(runs) > 1 else ())


def _same_step(runs: Sequence[Run], index: int, t: int) -> list[Step]:
    tracks = [run.tracks[index] for run in runs if index < len(run.tracks)]
    return [track.steps[t] for track in tracks if t < len(track.steps)]


def _with_own_rows(runs: Sequence[Run]) -> list[Run]:
    """The other ranks that took rows of their own: ranks of tensor parallelism take the same ones all the time."""
    seen, distinct = [_rows(runs[0])], []
    for run in runs[1:]:
        if (rows := _rows(run)) not in seen:
            seen.append(rows)
            distinct.append(run)
    return distinct


def _rows(run: Run) -> list[tuple[str, ...] | None]:
    return [backward.rows for step in run.steps for backward in step.backwards]


def _pooled_step(step: Step, others: Sequence[Step], readers: Sequence[Step]) -> Step:
    """With the gradients of all ranks, and the rows of those in `readers` besides the first rank's."""
    averaged = _mean([step.total, *(other.total for other in others)])
    factor = _factor(step.gradient, averaged, 1 + len(others))
    backwards = []
    for k, backward in enumerate(step.backwards):
        same = [backward, *(other.backwards[k] for other in others if k < len(other.backwards))]
        own = [b.local for b in same if b.local is not None]
        given = _mean([b.contribution for b in same])
        backward = replace(
            backward,
            contribution=backward.contribution if given is None else given * factor,
            locals=tuple(own) if len(own) == len(same) else (),
            rows=_chained(backward.rows, [other.backwards[k].rows for other in readers if k < len(other.backwards)]),
        )
        backwards.append(backward)
    return replace(step, total=step.total if averaged is None else averaged * factor, backwards=tuple(backwards))


def _mean(vectors: Sequence[Vector | None]) -> Vector | None:
    """Of what each rank gave, which is averaged over them before the step; None where all gave the same, or it is not known."""
    first, *others = vectors
    if first is None or all(other is not None and np.array_equal(first, other, equal_nan=True) for other in others):
        return None
    known = [v for v in vectors if v is not None and v.shape == first.shape]
    return np.asarray(np.mean(known, axis=0)) if len(known) == len(vectors) else None


def _factor(gradient: Vector, averaged: Vector | None, ranks: int) -> int:
    """The number of ranks where the gradient is their sum, and not their mean: as far as its size shows."""
    if averaged is None or averaged.shape != gradient.shape or not averaged.any():
        return 1
    return ranks if dot(gradient, averaged) / dot(averaged, averaged) > math.sqrt(ranks) else 1


def _chained(rows: tuple[str, ...] | None, others: Sequence[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    if rows is None or any(other is None for other in others):
        return None
    return tuple(chain(rows, *(other or () for other in others)))


def _rank_distances(runs: Sequence[Run]) -> tuple[float, ...]:
    """Per optimizer step, the largest relative distance of any rank's gradient from the first rank's."""
    tracks = [zip(*(track.steps for track in same), strict=False) for same in zip(*(run.tracks for run in runs), strict=False)]
    each = [[max(distance(other.gradient, first.gradient) for other in others) for first, *others in of_one] for of_one in tracks]
    return tuple(map(max, zip_longest(*each, fillvalue=0.0)))


def disagreement(candidate: Run, gate: float) -> list[Finding]:
    """Ranks that step on gradients of their own. All arms of the same run may have it; it is wrong at every N.

    Args:
        candidate: The run with micro-batches.
        gate: The distance that rounding explains.

    Returns:
        One finding for the first step that differs, or none.
    """
    for t, apart in enumerate(candidate.rank_distances):
        if not apart <= gate:
            evidence = {"distance_between_ranks": apart, "gate": gate, "ranks": candidate.ranks}
            message = f"the ranks step on different gradients ({apart:.2g} apart): they are not averaged before the step"
            return [Finding(candidate.accumulation_steps, t, Cause.replicas_not_synchronised, evidence, message, "ranks")]
    return []


# -- parts of one model -----------------------------------------------------------------------------------------------


def _of_parts(runs: Sequence[Run], groups: Sequence[Sequence[int]], like: Run | None) -> Run:
    """Every run is one part, held by a group of ranks."""
    num_ranks = sum(len(group) for group in groups)
    shared_out = all(run.sharded for run in runs) or all(run.copies for run in runs)  # FSDP1, ZeRO: each rank has its own rows
    tracks = []
    for index, parts in enumerate(zip(*(run.tracks for run in runs), strict=False)):
        known = like.tracks[index] if like is not None and index < len(like.tracks) else None
        firsts = [part.steps[0] for part in parts if part.steps]
        layout = Layout.of(firsts, known, groups, shared_out=shared_out)
        tracks.append(layout.track(parts) if len(firsts) == len(parts) else parts[0])
    distances = [run.rank_distances for run in runs if run.rank_distances]
    return _merged(
        runs,
        OF_RUNS,
        tracks=tracks,
        ranks=num_ranks if shared_out else runs[0].ranks,
        parts=() if shared_out else tuple(tuple(group) for group in groups),
        rank_distances=tuple(max(at) for at in zip(*distances, strict=False)),
    )


@dataclass(frozen=True)
class Layout:
    """Where the tensors of all parts are in the joined vectors."""

    tensors: tuple[tuple[tuple[str, int], ...], ...]  # of each part: (name, elements)
    order: tuple[tuple[int, int], ...]  # (part, tensor of it), as they are joined
    groups: Sequence[Sequence[int]]  # the ranks that hold each part
    shared_out: bool  # a micro-batch's gradient is known of each rank as a whole only

    @classmethod
    def of(cls, steps: Sequence[Step], like: Track | None, groups: Sequence[Sequence[int]], *, shared_out: bool) -> Layout:
        """In the order of `like` where it holds the same tensors; otherwise one part after the other."""
        natural = [(part, place) for part, step in enumerate(steps) for place in range(len(step.tensors))]
        found = [places(step.tensors, step.before, like) or () for step in steps] if like is not None and like.steps else []
        if found and sorted(place for part in found for place in part) == list(range(len(natural))):
            natural.sort(key=lambda at: found[at[0]][at[1]])
        return cls(tuple(step.tensors for step in steps), tuple(natural), groups, shared_out)

    @property
    def joined(self) -> tuple[tuple[str, int], ...]:
        """(name, elements) in the order of the joined vectors; with the number of the part where a name is in several."""
        names = [self.tensors[part][place][0] for part, place in self.order]
        alone = len(set(names)) == len(names)
        found = zip(names, self.order, strict=True)
        return tuple((name if alone else f"part {part} {name}", self.tensors[part][place][1]) for name, (part, place) in found)

    def held(self, part: int) -> tuple[int, ...]:
        """The places among the joined tensors of those of a part, in its own order."""
        where = {at: place for place, at in enumerate(self.order)}
        return tuple(where[part, place] for place in range(len(self.tensors[part])))

    def in_order(self, numbers: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """Numbers of each part's tensors, put together."""
        return tuple(numbers[part][place] for part, place in self.order)

    def join(self, vectors: Sequence[Vector | None]) -> Vector | None:
        """[P] One vector of each part, put together; None unless every part has one of its own size."""
        edges = [_edges(each) for each in self.tensors]
        pieces = [np.split(v, at[1:-1]) for v, at in zip(vectors, edges, strict=True) if v is not None and v.size == at[-1]]
        known = len(pieces) == len(edges)
        return np.concatenate([pieces[part][place] for part, place in self.order]) if known else None

    def join_moved(self, vectors: Sequence[Vector | None]) -> Vector | None:
        """Zeros where a part has none; None where none has."""
        if all(v is None for v in vectors):
            return None
        return self.join([np.zeros(_edges(each)[-1]) if v is None else v for v, each in zip(vectors, self.tensors, strict=True)])

    def cut(self, whole: Vector) -> Vector:
        """A gradient of whole tensors, each of which every part holds a piece of, in the order of these pieces."""
        counts = [[count for _, count in tensors] for tensors in self.tensors]
        widths = np.sum(counts, axis=0) if len({len(each) for each in counts}) == 1 else np.zeros(1, dtype=int)
        if whole.size != widths.sum():
            return whole
        starts = np.cumsum([0, *widths[:-1]]) + np.cumsum([[0] * len(widths), *counts[:-1]], axis=0)
        return np.concatenate([whole[starts[at] : starts[at] + counts[at[0]][at[1]]] for at in self.order])

    def track(self, parts: Sequence[Track]) -> Track:
        """One of all parts."""
        steps = [*map(self._step, zip(*(part.steps for part in parts), strict=False))]
        start = self.join([part.start for part in parts])
        return replace(parts[0], steps=steps, start=start, tensors=self.joined)

    def _step(self, steps: Sequence[Step]) -> Step:
        steps = [*map(_without_contributions, steps)] if self.shared_out else steps
        of_rank = {rank: self.held(part) for part, group in enumerate(self.groups) for rank in group}
        shared = [key for key in steps[0].state if all(key in step.state for step in steps)]
        states = {key: self.join([step.state[key] for step in steps]) for key in shared}
        rules: Rules = {
            **dict.fromkeys(("gradient", "before", "after", "total"), self.join),
            **dict.fromkeys(("spreads", "roundoffs"), self.in_order),
            "moved": self.join_moved,
            "skipped": any,
        }
        return _merged(
            steps,
            rules,
            tensors=self.joined,
            state={key: values for key, values in states.items() if values is not None},
            shards=tuple(of_rank[rank] for rank in sorted(of_rank)),
            backwards=self._backwards(steps),
            clips=self._clips(steps),
        )

    def _backwards(self, steps: Sequence[Step]) -> tuple[Backward, ...]:
        """The k-th of every part together; those of the first part alone, without what it gave, where their numbers differ."""
        if len({len(step.backwards) for step in steps}) > 1:
            return tuple(replace(b, contribution=None, moved=None, locals=()) for b in steps[0].backwards)
        return tuple(map(self._backward, zip(*(step.backwards for step in steps), strict=True)))

    def _backward(self, parts: Sequence[Backward]) -> Backward:
        """Rows and forwards are those of the first part (later stages see activations); rows of all where each has its own."""
        rows = parts[0].rows
        if self.shared_out:
            each: list[Vector | None] = [
                self.cut(local) for part in parts for local in part.locals if all(p.locals for p in parts)
            ]
            rows = _chained(rows, [part.rows for part in parts[1:]])
        else:
            each = [self.join(locals_) for locals_ in zip(*(part.locals for part in parts), strict=False)]
        rules: Rules = {
            "loss": lambda each: next((loss for loss in each if not math.isnan(loss)), math.nan),
            "start": lambda each: min(each, key=FIRST_TOLD.index),
            "emptied": lambda each: frozenset(self.held(part)[place] for part, places in enumerate(each) for place in places),
            "contribution": self.join,
            "rescaled": lambda each: math.hypot(*each),
            "moved": self.join_moved,
            "finite": all,
            **dict.fromkeys(("draws", "outside"), any),
        }
        own = tuple(local for local in each if local is not None)
        return _merged(parts, rules, locals=own if len(own) == len(each) else (), rows=rows)

    def _clips(self, steps: Sequence[Step]) -> tuple[Clip, ...]:
        """None where the parts are clipped at other places of the window."""
        if len({tuple(clip.after for clip in step.clips) for step in steps}) > 1:
            return ()
        rules: Rules = {"before": self.join, "left": self.join, "active": any}
        return tuple(_merged(clips, rules) for clips in zip(*(step.clips for step in steps), strict=True))


def _edges(tensors: Sequence[tuple[str, int]]) -> Vector:
    return np.cumsum([0, *(count for _, count in tensors)])


def places(tensors: Sequence[tuple[str, int]], start: Vector, like: Track) -> tuple[int, ...] | None:
    """Find where the tensors of a part are among those of the whole model.

    They have the names of those there, or begin as a run of neighbours there does, and only one.

    Args:
        tensors: Name and number of elements of each tensor of the part.
        start: [P] the weights with which the part begins.
        like: A track of the whole model.

    Returns:
        The place of each; None where that is not known.
    """
    if not like.steps:
        return None
    there, values = like.steps[0].tensors, like.steps[0].before
    theirs = [values[a:b] for a, b in pairwise(_edges(there))]
    own = [start[a:b] for a, b in pairwise(_edges(tensors))]
    by_name = {_canonical(name): place for place, (name, _) in enumerate(there)}
    named = [by_name.get(_canonical(name)) for name, _ in tensors]
    runs = [range(first, first + len(own)) for first in range(len(there) - len(own) + 1)]
    alike = [run for run in runs if all(_begin_alike(a, theirs[place]) for a, place in zip(own, run, strict=True))]
    if all(place is not None and _begin_alike(a, theirs[place]) for a, place in zip(own, named, strict=True)):
        return tuple(place for place in named if place is not None)
    return tuple(alike[0]) if len(alike) == 1 else None


def _canonical(name: str) -> str:
    """Without what wrappers put before it."""
    return name.removeprefix("module.")


def _begin_alike(a: Vector, b: Vector) -> bool:
    return a.shape == b.shape and norm(a - b) <= SAME_START * norm(b)


def _without_contributions(step: Step) -> Step:
    backwards = tuple(replace(b, contribution=None, moved=None) for b in step.backwards)
    return replace(step, total=None, spreads=(0.0,) * len(step.tensors), moved=None, backwards=backwards, clips=())
