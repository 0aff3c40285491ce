"""Two optimizer steps beside each other: which backwards and which gradient are judged, and distances between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise, takewhile
from typing import Any, Literal, TypeVar

import numpy as np

from accumulation_harness.audit.evidence import SUMMED, Backward, Clip, Run, Step, Track, Vector, given_by, norms_by
from accumulation_harness.compare.linear import distance

Rows = Literal["same", "different", "unknown"]  # of a window, beside the reference's
R = TypeVar("R", Step, Backward, Clip)


def effective(track: Track) -> list[Step]:
    """The steps that could move parameters, each with the backwards of the idle steps before it.

    Args:
        track: Steps of one optimizer.

    Returns:
        The steps.
    """
    kept, waiting = [], []
    for step in track.steps:
        if not step.effective:
            waiting.append(step)
            continue
        if waiting:
            backwards = tuple(b for s in waiting for b in s.backwards) + step.backwards
            step = replace(step, backwards=backwards)
            waiting = []
        kept.append(step)
    return kept


def without_preparation(mine: Track, theirs: Track) -> tuple[list[Step], list[Step]]:
    """The effective steps of both. Where both begin with steps that move nothing (SOAP's basis), these are left out.

    Args:
        mine: Steps with micro-batches.
        theirs: The reference's steps.

    Returns:
        Steps of the accumulated run, steps of the reference.
    """
    both = takewhile(lambda pair: not (pair[0].effective or pair[1].effective), zip(mine.steps, theirs.steps, strict=False))
    num = sum(1 for _ in both)
    a, b = (effective(replace(track, steps=track.steps[num:])) for track in (mine, theirs))
    return a, b


def without_constants(mine: Track, theirs: Track) -> tuple[Track, Track]:
    """Both without the rows that every backward of both was made with (a prompt): these are none of the windows'.

    Args:
        mine: Steps with micro-batches.
        theirs: The reference's steps.

    Returns:
        Both tracks.
    """
    every = [set(b.rows) for track in (mine, theirs) for step in track.steps for b in step.backwards if b.rows]
    constant = set.intersection(*every) if len(every) >= FEWEST_BACKWARDS else set()
    if not constant:
        return mine, theirs

    def of(b: Backward) -> Backward:
        return replace(b, rows=tuple(row for row in b.rows or () if row not in constant) or None)

    def cut(track: Track) -> Track:
        steps = [replace(step, backwards=tuple(map(of, step.backwards))) for step in track.steps]
        return replace(track, steps=steps, pending=[of(b) for b in track.pending])

    return cut(mine), cut(theirs)


FEWEST_BACKWARDS = 4  # in which a row that is in all of them is no row of the data


def until_not_finite(mine: list[Step], theirs: list[Step]) -> tuple[list[Step], list[Step]]:
    """The steps of both that begin with finite weights at N=1; of later ones nothing can be said.

    Args:
        mine: Steps of the accumulated run.
        theirs: Steps of the reference.

    Returns:
        Both, cut at the same place.
    """
    broken = (place for place, step in enumerate(theirs) if place and not np.isfinite(step.before).all())
    end = next(broken, max(len(mine), len(theirs)))
    return mine[:end], theirs[:end]


def evaluations(step: Step) -> list[tuple[Backward, ...]]:
    """The window cut where gradients were cleared: closures and two-pass steps evaluate their gradient more than once.

    Args:
        step: A recorded optimizer step.

    Returns:
        Backwards of each evaluation.
    """
    cuts = [k for k, b in enumerate(step.backwards) if k and b.start == "cleared"]
    edges = [0, *cuts, len(step.backwards)]
    return [step.backwards[a:b] for a, b in pairwise(edges)]


def judged(mine: Step, theirs: Step, num_micro_batches: int, gate: float) -> tuple[Step, Step]:
    """Reduce two steps to one evaluation each where both arms evaluate whole windows more than once.

    Where the parameters moved in between, the first evaluation alone starts from equal parameters: it is taken when it
    differs.

    Args:
        mine: The candidate's step.
        theirs: The reference's.
        num_micro_batches: N.
        gate: The relative distance that rounding explains.

    Returns:
        The steps to compare.
    """
    a, b = evaluations(mine), evaluations(theirs)
    if len(a) == len(b) == 1 or not _whole(a[-1], b[-1], num_micro_batches):
        return mine, theirs
    moved = all(any(p.moved is not None for part in parts[1:] for p in part) for parts in (a, b))
    if moved and _whole(a[0], b[0], num_micro_batches):
        first = _evaluated(mine, a[0]), _evaluated(theirs, b[0])
        if first[0] is not None and first[1] is not None and not distance(first[0].unclipped, first[1].unclipped) <= gate:
            return first[0], first[1]
    return _last(mine, a[-1]), _last(theirs, b[-1])


def _whole(mine: tuple[Backward, ...], theirs: tuple[Backward, ...], num_micro_batches: int) -> bool:
    """Whether both hold the same rows; by their number where rows are unknown (a second backward of one forward has none)."""
    if any(b.rows is None for b in (*mine, *theirs)) or not any(b.rows for b in mine) or not any(b.rows for b in theirs):
        return len(mine) == num_micro_batches
    return sorted(r for b in mine for r in b.rows or ()) == sorted(r for b in theirs for r in b.rows or ())


def _evaluated(step: Step, part: tuple[Backward, ...]) -> Step | None:
    """The step as if it had ended after its first evaluation; None where contributions were not kept."""
    total = given_by(part)
    if total is None:
        return None
    return replace(step, gradient=total, sums=None, total=total, backwards=part, clips=(), moved=None)


def _last(step: Step, part: tuple[Backward, ...]) -> Step:
    dropped = len(step.backwards) - len(part)
    if not dropped:
        return step
    first = replace(part[0], start="empty", emptied=frozenset(), moved=None)
    clips = tuple(replace(c, after=c.after - dropped) for c in step.clips if c.after > dropped)
    return replace(step, backwards=(first, *part[1:]), clips=clips, total=given_by(part))


def consumed_distance(mine: Step, theirs: Step) -> float:
    """Compare the gradients that two steps took; of samples, the sums of all elements as well.

    Args:
        mine: The step with micro-batches.
        theirs: The reference's step.

    Returns:
        ||a - g|| / ||g||, with the norm over the elements that are compared.
    """
    apart = distance(mine.gradient, theirs.gradient)
    if mine.sums is None or theirs.sums is None:
        return apart
    return max(apart, distance(mine.sums, theirs.sums))


def compare_rows(mine: Step, theirs: Step) -> Rows:
    """Whether the windows of the two steps hold the same rows, each as often; other ones made from weights tell nothing.

    Args:
        mine: The step with micro-batches.
        theirs: The reference's step.

    Returns:
        `same`, `other` or `unknown`, and what `Rows` has besides.
    """
    a, b = mine.rows, theirs.rows
    if not a or not b:
        return "unknown"
    if a == b:
        return "same"
    held = Counter(row for backward in mine.backwards for row in {*(backward.rows or ())})
    in_more_forwards = a.keys() == b.keys() and held <= b  # of one backward: a term more, and no row again
    computed = any(backward.computed for backward in (*mine.backwards, *theirs.backwards))
    return "unknown" if in_more_forwards or computed else "different"


def update_distances(mine: Step, theirs: Step, keep: np.ndarray) -> Vector:
    """Measure the distance of two updates by tensor, elements that move by noise left out.

    A parameter is stored to u of its own size: no update is known better than that.

    Args:
        mine: The candidate's step.
        theirs: The reference's.
        keep: [P] which elements count.

    Returns:
        [tensors] ||a - b|| / ||b||; infinite where one was skipped.
    """
    if mine.skipped != theirs.skipped or mine.before.shape != theirs.before.shape:
        return np.full(len(theirs.tensors), math.inf)
    a, b, counts = np.where(keep, mine.movement, 0.0), np.where(keep, theirs.movement, 0.0), theirs.counts
    apart, known = norms_by(counts, a - b), norms_by(counts, np.where(keep, theirs.before, 0.0)) * 2 * np.array(theirs.roundoffs)
    return relative(np.where(apart <= known, 0.0, apart), norms_by(counts, b))


def state_distance(mine: Step, theirs: Step) -> float:
    """The largest relative distance of an entry of the optimizer's state that both steps have; 0 without any.

    Args:
        mine: The step with micro-batches.
        theirs: The reference's step.

    Returns:
        ||a - g|| / ||g|| of the entry that differs most.
    """
    shared = [key for key in theirs.state if key in mine.state and mine.state[key].shape == theirs.state[key].shape]
    return max((finite(distance(mine.state[key], theirs.state[key])) for key in shared), default=0.0)


def finite(value: float) -> float:
    """The value; infinity for NaN, which would compare as within any gate or none.

    Args:
        value: A distance.

    Returns:
        The distance, never NaN.
    """
    return math.inf if math.isnan(value) else value


def relative(apart: Vector, sizes: Vector) -> Vector:
    """Distances of these sizes; infinite for NaN, and where the size alone is zero.

    Args:
        apart: [n] distances.
        sizes: [n] sizes.

    Returns:
        [n] distances over sizes.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(apart == 0, 0.0, apart / sizes)
    return np.asarray(np.where(np.isnan(found), math.inf, found))


def slices(step: Step) -> dict[str, slice]:
    """Tensor's name -> where it lies in the vectors of a step.

    Args:
        step: A recorded optimizer step.

    Returns:
        Name -> slice.
    """
    edges = pairwise(np.cumsum([0, *step.counts]))
    return {name: slice(int(a), int(b)) for (name, _), (a, b) in zip(step.tensors, edges, strict=True)}


def views(step: Step) -> list[tuple[Vector, tuple[int, ...]]]:
    """What is compared of a step's gradients tensor by tensor, with the elements of each: before clipping, as taken, and sums.

    Args:
        step: A recorded optimizer step.

    Returns:
        Pairs of a vector and the number of elements of each tensor in it.
    """
    counts = step.counts
    sums = [(step.sums, tuple(-(-count // SUMMED) for _, count in step.tensors))] if step.sums is not None else []
    return [(step.unclipped, counts), (step.gradient, counts), *sums]


def of_tensors(step: Step, chosen: Sequence[int]) -> Step:
    """The step as if its optimizer held these of its tensors alone.

    Args:
        step: A recorded optimizer step.
        chosen: Places of the tensors that are kept.

    Returns:
        Another step.
    """
    own, size = step.elements(chosen), sum(step.counts)
    blocks = np.cumsum([0, *(-(-count // SUMMED) for _, count in step.tensors)])
    summed = np.concatenate([np.arange(blocks[i], blocks[i + 1]) for i in chosen])
    places = {place: k for k, place in enumerate(chosen)}

    def cut(one: R, **changed: Any) -> R:
        values = {each.name: getattr(one, each.name) for each in fields(one)}
        of_elements = {name: v[own] for name, v in values.items() if isinstance(v, np.ndarray) and v.size == size}
        return replace(one, **of_elements | changed)

    def cut_backward(b: Backward) -> Backward:
        kept = frozenset(places[place] for place in b.emptied if place in places)
        return cut(b, locals=tuple(v[own] if v.size == size else v for v in b.locals), emptied=kept)

    return cut(
        step,
        tensors=tuple(step.tensors[i] for i in chosen),
        kept=tuple(step.kept[i] for i in chosen) if step.kept else (),
        sums=None if step.sums is None else step.sums[summed],
        spreads=tuple(step.spreads[i] for i in chosen),
        roundoffs=tuple(step.roundoffs[i] for i in chosen),
        backwards=tuple(map(cut_backward, step.backwards)),
        clips=tuple(map(cut, step.clips)),
    )


RESTORED = 1e-3  # relative; gradients found by a resumed run are those that were saved


def stitched(run: Run) -> list[Track]:
    """The tracks of a run, those of the same tensors joined where one begins after another has ended; `run` stays as it is.

    Args:
        run: A recorded run.

    Returns:
        The tracks.
    """
    kept: list[Track] = []
    for track in run.tracks:
        last = next((t for t in kept if sizes(t) == sizes(track) and 0 < t.last_backward < track.first_backward), None)
        if last is None:
            kept.append(replace(track))
            continue
        steps, lost = (track.steps, len(last.pending)) if not _restored(last, track) else (_continued(last, track), 0)
        last.resumed = (*last.resumed, (len(last.steps), lost))
        last.steps, last.pending, last.last_backward = [*last.steps, *steps], track.pending, track.last_backward
    return _told_apart(kept)


def _told_apart(tracks: list[Track]) -> list[Track]:
    """Optimizers of one name, by their parameters."""
    names = [track.name for track in tracks]
    for place, track in enumerate(tracks):
        if names.count(track.name) > 1:
            first = ", ".join(name for name, _ in track.tensors[:2]) + (", ..." if len(track.tensors) > 2 else "")
            tracks[place] = replace(track, name=f"{track.name} {1 + names[:place].count(track.name)} ({first})")
    return tracks


def _restored(last: Track, track: Track) -> bool:
    """Whether the resumed run found the gradients that the window had so far."""
    so_far, first = given_by(last.pending), track.steps[0] if track.steps else None
    if so_far is None or first is None or first.total is None:
        return False
    return distance(first.unclipped - first.total, so_far) <= RESTORED


def _continued(last: Track, track: Track) -> list[Step]:
    """The steps of the resumed run; the first with what came before it in its window."""
    first, *others = track.steps
    own = (replace(first.backwards[0], start="kept", emptied=frozenset(), moved=None), *first.backwards[1:])
    return [replace(first, backwards=(*last.pending, *own), total=first.unclipped), *others]


def sizes(track: Track) -> list[int]:
    """Elements of each tensor of the optimizer.

    Args:
        track: Steps of one optimizer.

    Returns:
        Counts, in the order of the tensors.
    """
    return [count for _, count in track.tensors]
