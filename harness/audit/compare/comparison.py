"""Two runs beside each other: from vectors to the plain numbers that the rules of `findings` read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from harness.audit.compare import fits
from harness.audit.compare.facts import OneTerm, RowFacts, RunFacts, StepFacts, TermFacts
from harness.audit.compare.floors import FACTOR, NOISE, Floor, Gates, gates, noisy
from harness.audit.compare.windows import (
    clipped_once,
    cosine,
    distance,
    effective,
    finite,
    judged,
    movement,
    raw,
    slices,
    state_distance,
    update_distance,
    window,
)
from harness.audit.evidence import Copy, Row, Run, Step, Track, Vector, overflow_is_expected
from harness.referee.gradients import compare, decompose

SAME_SUM = 1e-5  # relative; the addends of a loss make up its gradient
RESTORED = 1e-3  # relative; gradients found by a resumed run are those that were saved


@dataclass(frozen=True)
class Facts:
    """Everything said of one optimizer of one candidate."""

    run: RunFacts
    steps: tuple[StepFacts, ...]


@dataclass
class Pair:
    """Aligned optimizer steps of candidate and reference."""

    mine: list[Step]
    theirs: list[Step]
    nulls: list[list[Step]]
    track: Track
    noise: list[np.ndarray] = field(default_factory=list)  # per step: elements whose update is noise


@overflow_is_expected
def facts(candidate: Run, reference: Run, floor: Floor) -> list[Facts]:
    """One `Facts` per optimizer, paired in the order in which they were made. Raises `ShapeError` when they do not pair."""
    mine, theirs = stitched(candidate), stitched(reference)
    if len(mine) != len(theirs):
        raise ShapeError(f"{len(mine)} optimizers instead of {len(theirs)}")
    pairs = zip(mine, theirs, strict=True)
    return [_track_facts(candidate, reference, floor, pair, index) for index, pair in enumerate(pairs)]


class ShapeError(ValueError):
    """The two runs train models that cannot be compared."""


def stitched(run: Run) -> list[Track]:
    """Optimizers of the same tensors, one of which begins where another has ended, are one: the run was resumed in between."""
    kept: list[Track] = []
    for track in run.tracks:
        last = next((t for t in kept if _sizes(t) == _sizes(track) and 0 < t.last_backward < track.first_backward), None)
        if last is None:
            kept.append(replace(track))
            continue
        steps, lost = (track.steps, len(last.pending)) if not _restored(last, track) else (_continued(last, track), 0)
        last.resumed = (*last.resumed, (len(last.steps), lost))
        last.steps, last.pending, last.last_backward = [*last.steps, *steps], track.pending, track.last_backward
    return kept


def _restored(last: Track, track: Track) -> bool:
    """Whether the resumed run found the gradients that the window had so far."""
    so_far = [b.contribution for b in last.pending if b.contribution is not None]
    first = track.steps[0] if track.steps else None
    if not so_far or first is None or first.total is None:
        return False
    found = raw(first) - first.total
    return found.shape == so_far[0].shape and distance(found, np.sum(so_far, axis=0)) <= RESTORED


def _continued(last: Track, track: Track) -> list[Step]:
    """The steps of the resumed run; the first with what came before it in its window."""
    first, *others = track.steps
    own = (replace(first.backwards[0], start="kept", emptied=frozenset(), moved=None), *first.backwards[1:])
    return [replace(first, backwards=(*last.pending, *own), total=raw(first)), *others]


def _track_facts(candidate: Run, reference: Run, floor: Floor, pairs: tuple[Track, Track], index: int) -> Facts:
    track, other = pairs
    if _sizes(track) != _sizes(other):
        raise ShapeError(f"{track.name} holds tensors of sizes {_sizes(track)[:12]} instead of {_sizes(other)[:12]}")
    nulls = [effective(n.tracks[index]) for n in floor.nulls if len(n.tracks) == len(reference.tracks)]
    pair = Pair(effective(track), effective(other), nulls, track)
    pair.noise = noisy(pair.theirs, nulls, reference)
    allowed = gates(pair.mine, pair.theirs, nulls, pair.noise, (candidate, reference), drift=floor.drift)
    for t, (mine, theirs) in enumerate(zip(pair.mine, pair.theirs, strict=False)):
        if mine.gradient.shape != theirs.gradient.shape:
            raise ShapeError(f"{track.name} holds {mine.gradient.size} elements at step {t} instead of {theirs.gradient.size}")
    steps = [_step_facts(pair, candidate, t, allowed) for t in range(min(len(pair.mine), len(pair.theirs)))]
    return Facts(_run_facts(pair, candidate, reference, track, other), tuple(steps))


def _sizes(track: Track) -> list[int]:
    return [count for _, count in track.tensors]


# -- one step -----------------------------------------------------------------------------------------------------------


def _step_facts(pair: Pair, candidate: Run, t: int, allowed: Gates) -> StepFacts:
    gate, keep, n = allowed.gradient[t], ~pair.noise[t], candidate.accumulation_steps
    mine, theirs = judged(pair.mine[t], pair.theirs[t], n, gate)
    bounds = clipped_once(mine) == clipped_once(theirs)
    a, g = (raw(mine), raw(theirs)) if bounds else (mine.gradient, theirs.gradient)
    consumed = compare(torch.from_numpy(mine.gradient), torch.from_numpy(theirs.gradient))
    before = compare(torch.from_numpy(a), torch.from_numpy(g))
    apart, raw_apart = distance(mine.gradient, theirs.gradient), distance(a, g)
    if mine.skipped and theirs.skipped:
        apart = raw_apart = 0.0  # a GradScaler left both out
    wrong = not (apart <= gate and raw_apart <= gate)
    before_it = pair.mine[t - 1] if t else None
    found, (weights, condition) = fits.fits(mine, theirs, before_it, a, g, candidate, gate) if wrong else ({}, ((), math.inf))
    ranked = fits.by_rank(mine, a, g, gate) if wrong and candidate.ranks > 1 and g.any() else (math.inf, (), math.inf)
    inside = [b.moved for b in mine.backwards[1:] if b.moved is not None]
    inside += [mine.moved] if mine.moved is not None else []
    return StepFacts(
        accumulation_steps=n,
        ranks=candidate.ranks,
        track=pair.track.name,
        step=t,
        gate=gate,
        roundoff=candidate.roundoff,
        distance=finite(apart),
        scale=consumed.scale,
        cosine=consumed.cosine,
        raw_distance=finite(raw_apart),
        raw_scale=before.scale,
        raw_cosine=before.cosine,
        clipped=any(c.active for c in mine.clips) or any(c.active for c in theirs.clips),
        backwards=len(mine.backwards),
        reference_backwards=len(theirs.backwards),
        rows=window(mine, theirs),
        fits=found,
        weights=weights,
        condition=condition,
        num_rows=mine.num_rows,
        kept=all(b.contribution is not None for b in mine.backwards),
        rank_residual=ranked[0],
        rank_weights=ranked[1],
        rank_condition=ranked[2],
        rescaled=fits.rescaled(mine),
        lost=fits.lost(mine, theirs, [null[t] for null in pair.nulls if t < len(null)]),
        float16=candidate.float16,
        partly=fits.partly(mine, a, g, gate) if wrong and np.isfinite(a).all() else (),
        found_changed=bool(mine.backwards) and mine.backwards[0].start == "changed",
        cleared_inside=sum(bool(b.emptied) for b in mine.backwards),
        cleared_at_last=fits.emptied_at_last(mine, a) if wrong else (),
        cleared_then_filled="zero_grad" in _calls_after_last(mine) and bool(a.any()),
        loaded_inside="load" in _calls_inside(mine),
        stale=t > 0 and bool(mine.backwards) and mine.backwards[0].start in ("kept", "scaled", "changed") and not _cleared(mine),
        active_clips_inside=sum(c.active and c.after < len(mine.backwards) for c in mine.clips),
        clips_scaled=any(c.active and c.scale > 1 and c.limit < c.scale for c in mine.clips),
        loss_scales=len({b.scale for b in mine.backwards}),
        buffers=_buffers(mine, theirs, [null[t] for null in pair.nulls if t < len(null)]),
        unscaled_inside=_unscaled_inside(mine),
        drawn_between=len(mine.backwards) > 1 and all(b.outside for b in mine.backwards[1:]),
        broken_forwards=sum(b.broken_forwards for b in mine.backwards),
        moves_inside=len(inside),
        reference_moves_inside=sum(b.moved is not None for b in theirs.backwards[1:]) + (theirs.moved is not None),
        move_along_weights=cosine(np.sum(inside, axis=0), mine.before) if inside else math.nan,
        low_precision=fits.low_precision(a, mine.total if mine.total is not None else g) if wrong else None,
        draws=any(b.draws for b in mine.backwards),
        outside_draws=any(b.outside for b in mine.backwards),
        dropout=candidate.dropout_calls > 0,
        batch_norm=candidate.norm_calls > 0,
        update_distance=update_distance(mine, theirs, keep),
        update_gate=allowed.update[t],
        update_along_weights=_along(movement(mine) - movement(theirs), theirs.before, keep),
        state_distance=state_distance(mine, theirs),
        state_gate=allowed.state[t],
        tensors=_tensors(mine, a, g),
    )


def _cleared(step: Step) -> bool:
    return any(b.start in ("cleared", "empty", "manual") for b in step.backwards)


def _buffers(mine: Step, theirs: Step, nulls: Sequence[Step]) -> tuple[str, ...]:
    """The model's buffers that have moved otherwise than rounding explains."""
    found = []
    for name in {**mine.buffers, **theirs.buffers}:
        wanted = theirs.buffers.get(name)
        null = max((distance(n.buffers[name], wanted) for n in nulls if wanted is not None and name in n.buffers), default=0.0)
        if wanted is None or name not in mine.buffers or distance(mine.buffers[name], wanted) > max(FACTOR * null, 1 / NOISE):
            found.append(name)
    return tuple(found)


def _unscaled_inside(step: Step) -> int:
    return step.calls[: len(step.calls) - len(_calls_after_last(step))].count("unscale")


def _calls_after_last(step: Step) -> tuple[str, ...]:
    """Those after the last backward."""
    return step.calls[max((place + 1 for place, call in enumerate(step.calls) if call == "backward"), default=0) :]


def _calls_inside(step: Step) -> tuple[str, ...]:
    """Those between the first backward and the last."""
    first = step.calls.index("backward") if "backward" in step.calls else 0
    return step.calls[first : len(step.calls) - len(_calls_after_last(step))]


def _along(difference: Vector, direction: Vector, keep: np.ndarray) -> float:
    """What is left of `difference` outside `direction`, relative; 1 when it points the other way (no shrinking)."""
    d, p = difference[keep], direction[keep]
    size = float(np.linalg.norm(d))
    return math.sqrt(max(0.0, 1 - min(1.0, cosine(d, p) ** 2))) if size and cosine(d, p) < 0 else 1.0


def _tensors(step: Step, a: Vector, g: Vector) -> dict[str, tuple[float, float, float]]:
    found = {}
    for name, part in slices(step).items():
        c = compare(torch.from_numpy(a[part]), torch.from_numpy(g[part]))
        found[name] = (c.distance, c.scale, c.cosine)
    return found


def rows(mine: Run, theirs: Run) -> RowFacts | None:
    """What two probed runs show of the same rows: outputs, and slopes of the loss by them. None when no row is known to both."""
    shared = [row for row in mine.probed if row in theirs.probed and _alike(mine.probed[row], theirs.probed[row])]
    used = [
        (mine.probed[row], theirs.probed[row]) for row in shared if theirs.probed[row].slope.any() or mine.probed[row].slope.any()
    ]
    if not used:
        return None
    factors: dict[int, list[float]] = {}
    outputs = residual = 0.0
    for a, b in used:
        outputs = max(outputs, finite(distance(a.output, b.output)))
        size = float(b.slope @ b.slope)
        factor = float(a.slope @ b.slope) / size if size else math.inf
        residual = max(residual, finite(distance(a.slope, factor * b.slope)) if size and factor else math.inf)
        factors.setdefault(a.micro_batch, []).append(factor)
    return RowFacts(outputs=outputs, residual=residual, factors=tuple(tuple(factors[k]) for k in sorted(factors)))


def separated(mine: Run, reference: Run, index: int) -> bool:
    """Whether the reference's loss couples rows that are in different micro-batches of the candidate's step `index`."""
    if not reference.coupled or not mine.tracks:
        return False
    steps = effective(mine.tracks[0])
    held = [set(b.rows or ()) for b in steps[index].backwards] if index < len(steps) else []
    return not all(any(rows.issuperset(pair) for rows in held) for pair in reference.coupled)


def terms(mine: Run, reference: Run, index: int) -> TermFacts | None:
    """Step `index` of the reference by the addends of the candidate's loss; None where these do not make up its gradient."""
    parts, wanted = _addends(mine, index), effective(reference.tracks[0])
    if not parts or index >= len(wanted):
        return None
    sums, g = [np.sum(addend, axis=0) for addend in parts], raw(wanted[index])
    if not all(part.any() for part in sums) or not g.any():
        return None
    made = decompose(torch.from_numpy(g), [torch.from_numpy(part) for part in sums])
    theirs = _addends(reference, index)
    pairs = zip(parts, theirs, strict=True) if len(parts) == len(theirs) else ()
    return TermFacts(
        weights=tuple(w / len(sums) for w in made.weights),
        residual=made.residual,
        condition=made.condition,
        each=tuple(
            replace(
                _one_term(of_each, np.sum(whole, axis=0), float(np.linalg.norm(g))), off_rows=_off_rows(mine, reference, place)
            )
            for place, (of_each, whole) in enumerate(pairs)
        ),
    )


def _addends(run: Run, index: int) -> list[list[Vector]]:
    """Per addend of the loss, what it gave in each backward of step `index`; empty where these do not add up to the gradient."""
    steps = effective(run.tracks[0]) if run.tracks else []
    if not run.terms or len({len(of_one) for of_one in run.terms}) != 1 or not run.terms[0] or index >= len(steps):
        return []
    parts = [list(addend) for addend in zip(*run.terms, strict=True)]
    whole, total = np.sum([np.sum(addend, axis=0) for addend in parts], axis=0), steps[index].total
    same = total is not None and distance(whole, total) <= max(SAME_SUM, 100 * run.roundoff)
    return parts if same and np.isfinite(whole).all() else []


def _one_term(parts: list[Vector], wanted: Vector, size: float) -> OneTerm:
    """`size`: of the whole reference gradient."""
    a, squared = np.sum(parts, axis=0), float(wanted @ wanted)
    usable = squared and 2 * len(parts) <= a.size and all(part.any() for part in parts)
    made = decompose(torch.from_numpy(wanted), [torch.from_numpy(part) for part in parts]) if usable else None
    return OneTerm(
        distance=float(np.linalg.norm(a - wanted)) / size,
        scale=float(a @ wanted) / squared if squared else math.inf,
        weights=tuple(w / len(parts) for w in made.weights) if made else (),
        residual=made.residual * math.sqrt(squared) / size if made else math.inf,
        condition=made.condition if made else math.inf,
    )


def _off_rows(mine: Run, reference: Run, place: int) -> float:
    """How far slopes of addend `place` by the same rows are from multiples of the reference's."""
    a, b = [
        {key: slope for of_one in run.term_slopes if place < len(of_one) for key, slope in of_one[place].items()}
        for run in (mine, reference)
    ]
    shared = [(a[key], b[key]) for key in a.keys() & b.keys() if a[key].any() and b[key].any() and a[key].shape == b[key].shape]
    return max((math.sqrt(max(0.0, 1 - cosine(x, y) ** 2)) for x, y in shared if x.size > 1), default=math.inf)


def _alike(a: Row, b: Row) -> bool:
    return a.output.shape == b.output.shape


# -- the whole run --------------------------------------------------------------------------------------------------------


def _run_facts(pair: Pair, candidate: Run, reference: Run, track: Track, other: Track) -> RunFacts:
    aligned = list(zip(pair.mine, pair.theirs, strict=False))
    known = _all_rows(track), _all_rows(other)
    repeated, never, foreign = _ledger(pair, *known)
    return RunFacts(
        accumulation_steps=candidate.accumulation_steps,
        track=track.name,
        steps=len(pair.mine),
        reference_steps=len(pair.theirs),
        idle_steps=len(track.steps) - len(pair.mine),
        reference_idle_steps=len(other.steps) - len(pair.theirs),
        backwards=tuple(len(s.backwards) for s in pair.mine),
        reference_backwards=tuple(len(s.backwards) for s in pair.theirs),
        pending=len(track.pending),
        windows=tuple(window(mine, theirs) for mine, theirs in aligned),
        repeated=repeated,
        never=never,
        foreign=foreign,
        lrs=tuple(s.lrs for s in pair.mine),
        reference_lrs=tuple(s.lrs for s in pair.theirs),
        schedule_calls=tuple(s.calls.count("schedule") for s in pair.mine),
        reference_schedule_calls=tuple(s.calls.count("schedule") for s in pair.theirs),
        horizon=candidate.horizon,
        reference_horizon=reference.horizon,
        lr_moves_inside=any(len({b.lrs for b in s.backwards} | {s.lrs}) > 1 for s in pair.mine),
        state_steps=tuple(s.state_step for s in pair.mine),
        reference_state_steps=tuple(s.state_step for s in pair.theirs),
        shadow_distances=_shadow_distances(pair),
        shadow_updates=tuple(s.shadow_updates for s in pair.mine),
        reference_shadow_updates=tuple(s.shadow_updates for s in pair.theirs),
        shadow_moves_inside=any(len({b.shadows for b in s.backwards if b.shadows}) > 1 for s in pair.mine),
        resumed=track.resumed,
        skipped=tuple(t for t, s in enumerate(pair.mine) if s.skipped),
        reference_skipped=tuple(t for t, s in enumerate(pair.theirs) if s.skipped),
        norm_updates=tuple(s.norm_updates for s in pair.mine),
        reference_norm_updates=tuple(s.norm_updates for s in pair.theirs),
        counts=candidate.counts,
        reference_counts=reference.counts,
        reported=candidate.reported,
        reference_reported=reference.reported,
        losses=tuple(_window_loss(s) for s in pair.mine),
        reference_losses=tuple(_window_loss(s) for s in pair.theirs),
        broken_windows=tuple(t for t, s in enumerate(pair.mine) if _is_broken(s))
        + ((len(pair.mine),) if _any_broken(track) else ()),
        reference_broken_windows=tuple(t for t, s in enumerate(pair.theirs) if _is_broken(s))
        + ((len(pair.theirs),) if _any_broken(other) else ()),
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


def _ledger(pair: Pair, mine: Counter[str], theirs: Counter[str]) -> tuple[tuple[int, ...], int, int]:
    """Rows used more often than in the reference's run, per step; rows never used; rows the reference does not know."""
    repeated, most = [], theirs
    used: Counter[str] = Counter()
    for step in pair.mine:
        rows = step.rows or Counter()
        used += rows
        repeated.append(sum(min(rows[row], used[row] - most[row]) for row in rows if row in most and used[row] > most[row]))
    if not mine or not theirs:
        return tuple(0 for _ in pair.mine), 0, 0
    return tuple(repeated), sum(row not in mine for row in theirs), sum(row not in theirs for row in mine)


def _shadow_distances(pair: Pair) -> tuple[tuple[int, float, float], ...]:
    """(step, distance, gate) of the averaged copies, relative to how far the reference's have moved."""
    seen = [t for t, step in enumerate(pair.theirs) if step.shadows]
    found = []
    for t in seen:
        theirs = pair.theirs[t]
        mine = pair.mine[t] if t < len(pair.mine) else None
        if mine is None or not _same_copies(mine, theirs):
            continue
        starts = [pair.theirs[0].before[c.start : c.start + c.values.size] for c in theirs.shadows]
        scale = [float(np.linalg.norm(c.values - start)) or math.inf for start, c in zip(starts, theirs.shadows, strict=True)]
        distance = max(_apart(a, b) / s for a, b, s in zip(mine.shadows, theirs.shadows, scale, strict=True))
        nulls = [n[t] for n in pair.nulls if t < len(n) and _same_copies(n[t], theirs)]
        null = max(
            (_apart(a, b) / s for n in nulls for a, b, s in zip(n.shadows, theirs.shadows, scale, strict=True)), default=0.0
        )
        found.append((t, distance, max(FACTOR * null, 1 / NOISE)))
    return tuple(found)


def _same_copies(mine: Step, theirs: Step) -> bool:
    return [(c.start, c.values.size) for c in mine.shadows] == [(c.start, c.values.size) for c in theirs.shadows]


def _apart(a: Copy, b: Copy) -> float:
    return float(np.linalg.norm(a.values - b.values))
