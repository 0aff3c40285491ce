"""Two runs beside each other: from vectors to the plain numbers that the rules read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from accumulation_harness.audit.compare.facts import (
    Accumulator,
    Apart,
    Compared,
    Facts,
    Layers,
    Precision,
    RankSum,
    RunFacts,
    RunSeen,
    Scaling,
    StepFacts,
    Update,
    Window,
)
from accumulation_harness.audit.compare.fits import (
    FEWEST,
    Fitted,
    by_rank,
    emptied_at_last,
    fits,
    giving,
    in_few,
    lost,
    narrow_format,
    rescaled,
)
from accumulation_harness.audit.compare.floors import COARSE_GATE, FACTOR, Floor, Gates, gates, noisy
from accumulation_harness.audit.compare.held import apart, laid_out
from accumulation_harness.audit.compare.windows import (
    clipped_once,
    compare_rows,
    consumed_distance,
    cosine,
    counts_of,
    distance,
    effective,
    finite,
    judged,
    movement,
    of_tensors,
    off_line,
    raw,
    sizes,
    slices,
    state_distance,
    stitched,
    until_not_finite,
    update_distances,
    views,
    without_constants,
    without_preparation,
)
from accumulation_harness.audit.evidence import Call, Run, Step, Track, Vector, norms_by, overflow_is_expected
from accumulation_harness.referee.gradients import compare


def run_facts(
    runs: tuple[Run, Run],
    tracks: tuple[Track, Track],
    steps: tuple[Sequence[Step], Sequence[Step]],
    nulls: Sequence[Sequence[Step]],
) -> RunFacts:
    """Each pair: of candidate and reference. `steps` and `nulls`: the effective ones of this optimizer."""
    (candidate, reference), (track, other), (mine, theirs) = runs, tracks, steps
    repeated, never, foreign = _count_rows(mine, _all_rows(track), _all_rows(other))
    return RunFacts(
        accumulation_steps=candidate.accumulation_steps,
        track=track.name,
        mine=_seen(candidate, track, mine),
        reference=_seen(reference, other, theirs),
        windows=tuple(compare_rows(a, b) for a, b in zip(mine, theirs, strict=False)),
        repeated=repeated,
        never=never,
        foreign=foreign,
        lr_moves_inside=any(len({b.lrs for b in s.backwards} | {s.lrs}) > 1 for s in mine),
        lr_gates=_rate_gates(theirs, nulls),
        laid_out=laid_out(candidate.held, reference.held),
        resumed=track.resumed,
    )


def _rate_gates(theirs: Sequence[Step], nulls: Sequence[Sequence[Step]]) -> tuple[float, ...]:
    """How far the rates of equal computations are apart, which weights may have been made from; rates of a schedule are equal."""
    found = [0.0]
    for t, step in enumerate(theirs):
        pairs = [(a, b) for null in nulls if t < len(null) for a, b in zip(null[t].lrs, step.lrs, strict=False) if b]
        found.append(max([found[-1], *(FACTOR * abs(a / b - 1) for a, b in pairs)]))
    return tuple(found[1:])


def _seen(run: Run, track: Track, steps: Sequence[Step]) -> RunSeen:
    broken = [t for t, step in enumerate(steps) if _is_broken(step)] + ([len(steps)] if _any_broken(track) else [])
    return RunSeen(
        steps=len(steps),
        idle_steps=len(track.steps) - len(steps),
        backwards=tuple(len(s.backwards) for s in steps),
        pending=len(track.pending),
        lrs=tuple(s.lrs for s in steps),
        schedule_calls=tuple(s.calls.count("schedule") for s in steps),
        state_steps=tuple(s.state_step for s in steps),
        losses=tuple(_window_loss(s) for s in steps),
        reported=run.reported,
        counts=run.counts,
        skipped=tuple(t for t, s in enumerate(steps) if s.skipped),
        broken_windows=tuple(broken),
    )


def _window_loss(step: Step) -> float:
    return sum(b.loss for b in step.backwards)


def _is_broken(step: Step) -> bool:
    return any(b.broken_forwards or not b.finite for b in step.backwards) or not np.isfinite(step.gradient).all()


def _any_broken(track: Track) -> bool:
    return any(b.broken_forwards or not b.finite for b in track.pending)


def _all_rows(track: Track) -> Counter[str]:
    backwards = [b for step in track.steps for b in step.backwards] + track.pending
    return Counter(row for b in backwards for row in b.rows or ())


def _count_rows(steps: Sequence[Step], mine: Counter[str], theirs: Counter[str]) -> tuple[tuple[int, ...], int, int]:
    """Rows used more often than in the reference's run, per step; rows never used; rows the reference does not know.

    `mine`, `theirs`: how often each row comes in the whole run of candidate and reference; nothing is counted without them.
    """
    if not mine or not theirs:
        return tuple(0 for _ in steps), 0, 0
    repeated = []
    used: Counter[str] = Counter()
    for step in steps:
        rows = step.rows or Counter()
        used += rows
        repeated.append(sum(min(rows[row], used[row] - theirs[row]) for row in rows if row in theirs and used[row] > theirs[row]))
    return tuple(repeated), sum(row not in mine for row in theirs), sum(row not in theirs for row in mine)


@dataclass(frozen=True)
class Aligned:
    """One optimizer step of the candidate and of the reference."""

    step: int
    mine: Step
    theirs: Step
    steps: Sequence[Step]  # all of the candidate's
    before: Step | None  # the candidate's step before
    nulls: Sequence[Step]  # the same step of the runs that do the same computation as the reference
    keep: np.ndarray  # mask [P] of the elements whose update is more than noise


OTHER_MOVE = 0.05  # relative; movements that differ by less are one, made of other weights


class ShapeError(ValueError):
    """The two runs train models that cannot be compared."""


@overflow_is_expected
def facts(candidate: Run, reference: Run, floor: Floor) -> list[Facts]:
    """One `Facts` per optimizer, paired in the order in which they were made. Raises `ShapeError` when they do not pair."""
    mine, theirs = stitched(candidate), stitched(reference)
    if len(mine) != len(theirs):
        raise ShapeError(f"{len(mine)} optimizers instead of {len(theirs)}")
    pairs = zip(mine, theirs, strict=True)
    held = apart(candidate.held, reference.held, [null.held for null in floor.nulls], floor.forgotten)
    return [_track_facts((candidate, reference), floor, pair, index, held) for index, pair in enumerate(pairs)]


def _track_facts(runs: tuple[Run, Run], floor: Floor, pair: tuple[Track, Track], index: int, held: tuple[Apart, ...]) -> Facts:
    (candidate, reference), (track, other) = runs, without_constants(*pair)
    if sizes(track) != sizes(other):
        raise ShapeError(f"{track.name} holds tensors of sizes {sizes(track)[:12]} instead of {sizes(other)[:12]}")
    mine, theirs = until_not_finite(*without_preparation(track, other))
    nulls = [effective(n.tracks[index]) for n in floor.nulls if len(n.tracks) == len(reference.tracks)]
    noise = noisy(mine, theirs, nulls)
    allowed = gates(mine, theirs, nulls, noise, runs, drift=floor.drift)
    for t, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a.gradient.shape != b.gradient.shape:
            raise ShapeError(f"{track.name} holds {a.gradient.size} elements at step {t} instead of {b.gradient.size}")
    steps = []
    for t, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        others = [null[t] for null in nulls if t < len(null)]
        aligned = Aligned(t, a, b, mine, mine[t - 1] if t else None, others, ~noise[t])
        buffers = tuple(one.path for one in held if one.of_model and one.window <= t + 1)
        steps.append(_step_facts(track.name, candidate, aligned, allowed, buffers))
    seen = run_facts(runs, (track, other), (mine, theirs), nulls)
    return Facts(replace(seen, apart=held if index == 0 else ()), tuple(steps))


def _step_facts(track: str, candidate: Run, aligned: Aligned, allowed: Gates, buffers: tuple[str, ...]) -> StepFacts:
    t, before, nulls, n = aligned.step, aligned.before, aligned.nulls, candidate.accumulation_steps
    gate = allowed.gradient[t]
    mine, theirs = judged(aligned.mine, aligned.theirs, n, gate)
    a, g = _judged_gradients(mine, theirs, gate)
    tensors = {name: _compared(a[part], g[part]) for name, part in slices(mine).items()}
    keep, only, places = aligned.keep, tuple[str, ...](), tuple[int, ...]()
    if chosen := _alone(mine, theirs, a, g, allowed.tensors[t]):
        places, gate = chosen
        only = tuple(mine.tensors[place][0] for place in places)
        keep = keep[np.concatenate([np.arange(*_edges(mine)[place : place + 2]) for place in places])]
        a, g = of_tensors(replace(mine, gradient=a), places).gradient, of_tensors(replace(theirs, gradient=g), places).gradient
        mine, theirs = of_tensors(mine, places), of_tensors(theirs, places)
        before, nulls = of_tensors(before, places) if before else None, [of_tensors(null, places) for null in nulls]
    skipped = mine.skipped and theirs.skipped  # a GradScaler left both out
    apart, raw_apart = (0.0, 0.0) if skipped else (finite(consumed_distance(mine, theirs)), finite(distance(a, g)))
    consumed, unclipped = _compared(mine.gradient, theirs.gradient, apart), _compared(a, g, raw_apart)
    # a gradient that differs outside the sample alone is wrong, and no prediction of what was kept says how
    wrong = not skipped and not (finite(distance(mine.gradient, theirs.gradient)) <= gate and unclipped.distance <= gate)
    fitted = fits(mine, theirs, before, a, g, candidate, gate) if wrong else Fitted()
    if wrong and a.size < FEWEST:
        fitted = in_few(fitted, a, mine, [raw(of_tensors(step, places)) if only else raw(step) for step in aligned.steps], gate)
    return StepFacts(
        accumulation_steps=n,
        ranks=candidate.ranks,
        track=track,
        step=t,
        gate=gate,
        whole_gate=allowed.gradient[t],
        consumed=consumed,
        raw=unclipped,
        window=_window(mine, theirs, keep),
        accumulator=_accumulator(mine, a, first=before is None, wrong=wrong),
        scaling=_scaling(mine, theirs),
        precision=_precision(mine, theirs, nulls, candidate, a, g, wrong=wrong),
        layers=Layers(dropout=candidate.dropout_calls > 0, batch_norm=candidate.norm_calls > 0, buffers=buffers),
        fits=fitted.fits,
        parts=fitted.right,
        taken=fitted.taken,
        rescaled=_multiple(mine.gradient, mine.total, gate),
        given=_ratio(mine.total, theirs.total),
        by_rank=by_rank(mine, a, g, gate) if wrong and candidate.ranks > 1 and g.any() else RankSum(),
        only=only,
        update=_update(aligned, allowed),
        tensors=tensors,
    )


def _multiple(a: Vector, total: Vector | None, gate: float) -> float:
    if total is None or total.shape != a.shape or not total.any() or off_line(a, total) > gate:
        return math.nan
    return float(a @ total) / float(total @ total)


def _ratio(mine: Vector | None, theirs: Vector | None) -> float:
    size = float(np.linalg.norm(theirs)) if theirs is not None else 0.0
    return float(np.linalg.norm(mine)) / size if mine is not None and size else math.nan


def _edges(step: Step) -> np.ndarray:
    return np.cumsum([0, *counts_of(step)])


def _judged_gradients(mine: Step, theirs: Step, gate: float) -> tuple[Vector, Vector]:
    """Those before clipping, where both arms are clipped alike."""
    bounds = clipped_once(mine) == clipped_once(theirs)
    return (_to_one_limit(mine, theirs, gate), raw(theirs)) if bounds else (mine.gradient, theirs.gradient)


def _alone(mine: Step, theirs: Step, a: Vector, g: Vector, allowed: Sequence[Vector]) -> tuple[tuple[int, ...], float] | None:
    """The places of the tensors whose gradients differ, and the gate of these together; None where no other is known to agree."""
    pairs = [(a, g), (mine.gradient, theirs.gradient), *([(mine.sums, theirs.sums)] if mine.sums is not None else [])]
    if mine.skipped or theirs.skipped:
        return None
    for (x, y), (_, counts), known in zip(pairs, views(theirs), allowed, strict=False):
        if x is None or y is None or x.shape != y.shape or not (np.isfinite(x).all() and np.isfinite(y).all()):
            continue
        sizes = norms_by(counts, y)
        apart = norms_by(counts, x - y)
        bounds = np.where(sizes > 0, known * sizes, known)
        off = apart > bounds
        agree = ~off & (sizes > 0) & (known <= COARSE_GATE)
        if off.any() and agree.any():
            size = float(np.linalg.norm(sizes[off]))
            return tuple(np.flatnonzero(off).tolist()), float(np.linalg.norm(bounds[off])) / size if size else 0.0
        if off.any():
            return None
    return None


def _update(aligned: Aligned, allowed: Gates) -> Update:
    """Of the tensor that is farthest beyond its gate."""
    mine, theirs, keep, gates = aligned.mine, aligned.theirs, aligned.keep, allowed.update[aligned.step]
    distances = update_distances(mine, theirs, keep)
    off = np.flatnonzero(distances > gates)
    worst = max(range(len(gates)), key=lambda i: distances[i] / gates[i] if gates[i] else distances[i], default=None)
    if worst is None:
        return Update()
    of_these = keep & np.repeat(np.isin(np.arange(len(gates)), off), counts_of(theirs)) if len(off) else keep
    others = len(off) < np.count_nonzero(np.isfinite(gates))
    return Update(
        distance=float(distances[worst]),
        gate=float(gates[worst]),
        only=tuple(theirs.tensors[i][0] for i in off) if others else (),
        known=float(np.repeat(np.isfinite(gates), counts_of(theirs)).mean()),
        along_weights=_along(movement(mine) - movement(theirs), theirs.before, of_these),
        state_distance=state_distance(mine, theirs),
        state_gate=allowed.state[aligned.step],
    )


def _to_one_limit(mine: Step, theirs: Step, gate: float) -> Vector:
    """The gradient before clipping; clipping N g to N c and dividing by N afterwards is clipping g to c."""
    a = raw(mine)
    if not (clipped_once(mine) and clipped_once(theirs)) or mine.clips[0].limit == theirs.clips[0].limit:
        return a
    if mine.clips[0].scale != 1 or not mine.clips[0].limit > 0 or not consumed_distance(mine, theirs) <= gate:
        return a
    divided = a * (theirs.clips[0].limit / mine.clips[0].limit)
    return divided if distance(divided, raw(theirs)) <= gate else a


def _compared(a: Vector, g: Vector, distance: float | None = None) -> Compared:
    seen = compare(torch.from_numpy(a), torch.from_numpy(g))
    return Compared(distance=seen.distance if distance is None else distance, scale=seen.scale, cosine=seen.cosine)


def _window(mine: Step, theirs: Step, keep: np.ndarray) -> Window:
    inside, usual, before = _moves_inside(mine), _moves_inside(theirs), _moved_before(mine, theirs)
    later = mine.backwards[1:]
    moved = np.sum(inside, axis=0) if inside else None
    apart = _otherwise(moved, np.sum(usual, axis=0), mine.before, keep) if moved is not None and usual else None
    return Window(
        backwards=len(mine.backwards),
        reference_backwards=len(theirs.backwards),
        rows=compare_rows(mine, theirs),
        forwards=max((b.forwards for b in mine.backwards), default=0),
        reference_forwards=max((b.forwards for b in theirs.backwards), default=0),
        num_rows=mine.num_rows,
        rows_each=tuple(len(b.rows or ()) for b in giving(mine)),
        without_terms=sum(b.contribution is not None and not b.contribution.any() for b in mine.backwards),
        kept=all(b.contribution is not None for b in mine.backwards),
        drawn_inside=any(b.draws for b in mine.backwards),
        drawn_outside=any(b.outside for b in mine.backwards),
        drawn_between=bool(later) and all(b.outside for b in later),
        other_steps=_other_steps(mine),
        reference_other_steps=_other_steps(theirs),
        moves=len(inside),
        reference_moves=len(usual),
        move_along_weights=cosine(moved, mine.before) if moved is not None else math.nan,
        moved_apart=_relative(apart, mine.before),
        apart_along_weights=cosine(apart, mine.before[keep]) if apart is not None else math.nan,
        moved_before=_relative(before, mine.before),
        before_along_weights=cosine(before[before != 0], mine.before[before != 0]) if before is not None else math.nan,
    )


def _other_steps(step: Step) -> int:
    """Steps of other optimizers after the first backward of the window, and before the last."""
    return _calls_inside(step).count("other step")


def _moves_inside(step: Step) -> list[Vector]:
    """Movements of the parameters between the window's first backward and the optimizer's step."""
    moves = [*(b.moved for b in step.backwards[1:]), step.moved]
    return [moved for moved in moves if moved is not None]


def _otherwise(moved: Vector, usual: Vector, before: Vector, keep: np.ndarray | slice = slice(None)) -> Vector | None:
    """How much further parameters `before` [P] moved than usual, noise left out; None where other weights may have made that."""
    if moved.shape != usual.shape or not np.isfinite(moved).all() or not np.isfinite(usual).all():
        return None
    a, b = moved[keep], usual[keep]
    apart, largest = float(np.linalg.norm(a - b)), max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return a - b if apart > OTHER_MOVE * largest and np.any(before) else None


def _relative(apart: Vector | None, before: Vector) -> float:
    return float(np.linalg.norm(apart) / np.linalg.norm(before)) if apart is not None else 0.0


def _moved_before(mine: Step, theirs: Step) -> Vector | None:
    """How much further something other than the optimizers moved the parameters since their steps before.

    None where the movements are the same but for what other weights make of them.
    """
    a, b = (step.backwards[0].moved if step.backwards else None for step in (mine, theirs))
    if a is None and b is None:
        return None
    moved, usual = (np.zeros_like(mine.before) if move is None else move for move in (a, b))
    return _otherwise(moved, usual, mine.before)


def _accumulator(mine: Step, a: Vector, *, first: bool, wrong: bool) -> Accumulator:
    """`a` [P]: the gradient before clipping; `first`: whether this is the first step of the run."""
    start = mine.backwards[0].start if mine.backwards else "empty"
    cleared = any(b.start in ("cleared", "empty", "manual") for b in mine.backwards)
    return Accumulator(
        found_changed=start == "changed",
        stale=not first and start in ("kept", "scaled", "changed") and not cleared,
        cleared_inside=sum(bool(b.emptied) for b in mine.backwards),
        cleared_at_last=emptied_at_last(mine, a) if wrong else (),
        cleared_then_filled="zero_grad" in _calls_after_last(mine) and bool(a.any()),
        loaded_inside="load" in _calls_inside(mine),
    )


def _scaling(mine: Step, theirs: Step) -> Scaling:
    before_last = mine.calls[: len(mine.calls) - len(_calls_after_last(mine))]
    return Scaling(
        clipped=any(c.active for c in (*mine.clips, *theirs.clips)),
        limits=(mine.clips[0].limit, theirs.clips[0].limit)
        if clipped_once(mine) and clipped_once(theirs)
        else (math.nan, math.nan),
        clips_inside=_clips_inside(mine),
        reference_clips_inside=_clips_inside(theirs),
        clips_scaled=any(c.active and c.scale > 1 and c.limit < c.scale for c in mine.clips),
        rescaled=rescaled(mine),
        loss_scales=len({b.scale for b in mine.backwards}),
        unscaled_inside=before_last.count("unscale"),
    )


def _clips_inside(step: Step) -> int:
    return sum(c.active and c.after < len(step.backwards) for c in step.clips)


def _precision(
    mine: Step, theirs: Step, nulls: Sequence[Step], candidate: Run, a: Vector, g: Vector, *, wrong: bool
) -> Precision:
    return Precision(
        roundoff=candidate.roundoff,
        float16=candidate.float16,
        lost=lost(mine, theirs, nulls),
        narrow=narrow_format(a, mine.total if mine.total is not None else g) if wrong else None,
    )


def _calls_after_last(step: Step) -> tuple[Call, ...]:
    """Those after the last backward."""
    return step.calls[max((place + 1 for place, call in enumerate(step.calls) if call == "backward"), default=0) :]


def _calls_inside(step: Step) -> tuple[Call, ...]:
    """Those between the first backward and the last."""
    first = step.calls.index("backward") if "backward" in step.calls else 0
    return step.calls[first : len(step.calls) - len(_calls_after_last(step))]


def _along(difference: Vector, direction: Vector, keep: np.ndarray) -> float:
    """What is left of `difference` outside `direction`, relative; 1 when it points the other way (no shrinking)."""
    d, p = difference[keep], direction[keep]
    size = float(np.linalg.norm(d))
    return math.sqrt(max(0.0, 1 - min(1.0, cosine(d, p) ** 2))) if size and cosine(d, p) < 0 else 1.0
