"""Two runs beside each other: from vectors to the plain numbers that the rules of `findings` read."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from harness.audit.evidence import Run, Step, Track, Vector
from harness.audit.facts import RunFacts, StepFacts
from harness.gradients import compare, decompose

# A distance that rounding explains is at most this many times the largest one seen among equal computations. Correct loops were
# seen at 0.02 to 1.2 times it (float32) and 0.2 times (bfloat16 autocast).
FACTOR, COARSE_FACTOR = 10.0, 4.0
COARSE_ROUNDOFF = 1e-5
NOISE = 1e3  # elements below this many roundings of the largest gradient move by noise under Adam (EQUIVALENCE.md, trap 4)
MOST_PARTS = 64  # micro-batch gradients decomposed into


@dataclass(frozen=True)
class Floor:
    """Runs that do the same computation as the reference, rounded differently."""

    nulls: Sequence[Run]
    drift: bool  # whether the runs go their own way (a null's distance then counts for all later steps)


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


def facts(candidate: Run, reference: Run, floor: Floor) -> list[Facts]:
    """One `Facts` per optimizer, paired in the order in which they were made. Raises `ShapeError` when they do not pair."""
    if len(candidate.tracks) != len(reference.tracks):
        raise ShapeError(f"{len(candidate.tracks)} optimizers instead of {len(reference.tracks)}")
    return [_track_facts(candidate, reference, floor, index) for index in range(len(reference.tracks))]


class ShapeError(ValueError):
    """The two runs train models that cannot be compared."""


def effective(track: Track) -> list[Step]:
    """The steps that could move parameters, each with the backwards of the idle steps before it."""
    kept, waiting = [], []
    for step in track.steps:
        if not step.effective:
            waiting.append(step)
            continue
        if waiting:
            backwards = tuple(b for s in waiting for b in s.backwards) + step.backwards
            step = dataclasses.replace(step, backwards=backwards)
            waiting = []
        kept.append(step)
    return kept


def _track_facts(candidate: Run, reference: Run, floor: Floor, index: int) -> Facts:
    track, other = candidate.tracks[index], reference.tracks[index]
    if [count for _, count in track.tensors] != [count for _, count in other.tensors]:
        raise ShapeError(f"{track.name} holds tensors of sizes {_sizes(track)} instead of {_sizes(other)}")
    nulls = [effective(n.tracks[index]) for n in floor.nulls if len(n.tracks) == len(reference.tracks)]
    pair = Pair(effective(track), effective(other), nulls, track)
    pair.noise = _noise(pair, reference)
    gates = _gates(pair, candidate, reference, floor)
    steps = [_step_facts(pair, candidate, t, gates) for t in range(min(len(pair.mine), len(pair.theirs)))]
    return Facts(_run_facts(pair, candidate, reference, track, other), tuple(steps))


def _sizes(track: Track) -> list[int]:
    return [count for _, count in track.tensors][:12]


# -- floors -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gates:
    gradient: list[float]
    update: list[float]
    state: list[float]


def _gates(pair: Pair, candidate: Run, reference: Run, floor: Floor) -> Gates:
    gradient, update, state = [], [], []
    factor = COARSE_FACTOR if reference.roundoff > COARSE_ROUNDOFF else FACTOR
    for t, theirs in enumerate(pair.theirs):
        others = [null[t] for null in pair.nulls if t < len(null)]
        mine = pair.mine[t] if t < len(pair.mine) else theirs
        seen = [_distance(raw(o), raw(theirs)) for o in others] + [_distance(o.gradient, theirs.gradient) for o in others]
        gradient.append(max(factor * _worst(seen), _summing(mine, theirs, candidate, reference)))
        keep = ~pair.noise[t]
        update.append(max(FACTOR * _worst([_update_distance(o, theirs, keep) for o in others]), 1 / NOISE))
        state.append(max(FACTOR * _worst([_state_distance(o, theirs) for o in others]), 1 / NOISE))
    if floor.drift and len(gradient) > 1:
        start = gradient[1] if gradient[0] < gradient[1] else gradient[0]  # the first step may come before any perturbation
        gradient = list(np.maximum.accumulate([start, *gradient[1:]]))
        update, state = list(np.maximum.accumulate(update)), list(np.maximum.accumulate(state))
    return Gates(gradient, update, state)


def _summing(mine: Step, theirs: Step, candidate: Run, reference: Run) -> float:
    """Rounding of the sum itself: (terms) * u * ||sum_k |c_k|| / ||g||, u of the accumulator (Higham 1993)."""
    size = float(np.linalg.norm(raw(theirs)))
    if not mine.backwards and not theirs.backwards:  # weights were handed over: float32 weights, and an update seen through them
        return max(1 / NOISE, FACTOR * 2.0**-23 * float(np.linalg.norm(theirs.before)) / size) if size else 0.0
    parts = [np.abs(b.contribution) for b in mine.backwards]
    if not size or not parts or not math.isfinite(size):
        return 0.0
    total = float(np.linalg.norm(np.sum(parts, axis=0)))
    wide = max(candidate.accumulator_roundoff, reference.accumulator_roundoff)
    rows = candidate.batch_size * candidate.accumulation_steps
    return ((len(parts) + 1) * wide + rows * min(wide, 2.0**-24)) * (total / size if math.isfinite(total) else 1.0)


def _worst(values: Sequence[float]) -> float:
    return max((v for v in values if math.isfinite(v)), default=0.0)


def _noise(pair: Pair, reference: Run) -> list[np.ndarray]:
    """Cumulative masks: elements with a gradient near its rounding, or whose update the nulls do not agree about."""
    masks, unit = [], reference.roundoff
    mask = np.zeros(0, dtype=bool)
    for t, theirs in enumerate(pair.theirs):
        gradient = np.abs(raw(theirs))
        now = gradient < NOISE * unit * (gradient.max(initial=0.0) if np.isfinite(gradient).all() else 0.0)
        for null in pair.nulls:
            if t < len(null):
                mine, own = null[t].after - null[t].before, theirs.after - theirs.before
                now |= np.abs(mine - own) > 0.01 * np.abs(own)
        mask = now if not mask.size else mask | now
        masks.append(mask)
    return masks


# -- one step -----------------------------------------------------------------------------------------------------------


def raw(step: Step) -> Vector:
    """The gradients before they were clipped once at the boundary; the consumed ones where they were not, or more often."""
    if len(step.clips) == 1 and step.clips[0].after == len(step.backwards):
        return step.clips[0].before / step.clips[0].scale
    return step.gradient


def _distance(a: Vector, b: Vector) -> float:
    if a.shape != b.shape:
        return math.inf
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    size = float(np.linalg.norm(b))
    distance = float(np.linalg.norm(a - b))
    if size == 0:
        return 0.0 if distance == 0 else math.inf
    return distance / size


def _step_facts(pair: Pair, candidate: Run, t: int, gates: Gates) -> StepFacts:
    mine, theirs = pair.mine[t], pair.theirs[t]
    bounds = bool(_clipped_once(mine)) == bool(_clipped_once(theirs))
    a, g = (raw(mine), raw(theirs)) if bounds else (mine.gradient, theirs.gradient)
    consumed = compare(torch.from_numpy(mine.gradient), torch.from_numpy(theirs.gradient))
    before = compare(torch.from_numpy(a), torch.from_numpy(g))
    distance, raw_distance = _distance(mine.gradient, theirs.gradient), _distance(a, g)
    if mine.skipped and theirs.skipped:
        distance = raw_distance = 0.0  # a GradScaler left both out
    gate, keep = gates.gradient[t], ~pair.noise[t]
    wrong = not (distance <= gate and raw_distance <= gate)
    fits, weights, condition = _fits(pair, t, a, g, candidate) if wrong else ({}, (), math.inf)
    inside = [b.moved for b in mine.backwards[1:] if b.moved is not None]
    inside += [mine.moved] if mine.moved is not None else []
    return StepFacts(
        accumulation_steps=candidate.accumulation_steps,
        ranks=candidate.ranks,
        track=pair.track.name,
        step=t,
        gate=gate,
        distance=_finite(distance),
        scale=consumed.scale,
        cosine=consumed.cosine,
        raw_distance=_finite(raw_distance),
        raw_scale=before.scale,
        raw_cosine=before.cosine,
        clipped=any(c.active for c in mine.clips) or any(c.active for c in theirs.clips),
        backwards=len(mine.backwards),
        reference_backwards=len(theirs.backwards),
        rows=window(mine, theirs),
        fits=fits,
        weights=weights,
        condition=condition,
        cleared_inside=sum(b.start == "cleared" for b in mine.backwards),
        stale=t > 0 and bool(mine.backwards) and mine.backwards[0].start in ("kept", "scaled", "changed") and not _cleared(mine),
        active_clips_inside=sum(c.active and c.after < len(mine.backwards) for c in mine.clips),
        clips_scaled=any(c.active and c.scale > 1 and c.limit < c.scale for c in mine.clips),
        loss_scales=len({b.scale for b in mine.backwards}),
        broken_forwards=sum(b.broken_forwards for b in mine.backwards),
        non_finite=not np.isfinite(mine.gradient).all(),
        reference_non_finite=not np.isfinite(theirs.gradient).all(),
        moves_inside=len(inside),
        reference_moves_inside=sum(b.moved is not None for b in theirs.backwards[1:]) + (theirs.moved is not None),
        move_along_weights=_cosine(np.sum(inside, axis=0), mine.before) if inside else math.nan,
        low_precision=_low_precision(a, _total(mine, g)) if wrong else None,
        draws=any(b.draws for b in mine.backwards),
        outside_draws=any(b.outside for b in mine.backwards),
        dropout=candidate.dropout_calls > 0,
        batch_norm=candidate.norm_calls > 0,
        update_distance=_update_distance(mine, theirs, keep),
        update_gate=gates.update[t],
        update_along_weights=_along(_move(mine) - _move(theirs), theirs.before, keep),
        state_distance=_state_distance(mine, theirs),
        state_gate=gates.state[t],
        tensors=_tensors(pair.track, a, g),
    )


def _clipped_once(step: Step) -> bool:
    return len(step.clips) == 1 and step.clips[0].after == len(step.backwards)


def _cleared(step: Step) -> bool:
    return any(b.start in ("cleared", "empty", "manual") for b in step.backwards)


def _finite(distance: float) -> float:
    return math.inf if math.isnan(distance) else distance


def window(mine: Step, theirs: Step) -> str:
    """Whether the two steps saw the same rows."""
    a, b = mine.rows, theirs.rows
    if not a or not b:
        return "unknown"
    return "same" if a == b else "different"


def _move(step: Step) -> Vector:
    return step.after - step.before


def _update_distance(mine: Step, theirs: Step, keep: np.ndarray) -> float:
    """Distance of the two updates, elements that move by noise left out; a skipped step against a taken one is infinite."""
    if mine.skipped != theirs.skipped:
        return math.inf
    a, b = _move(mine)[keep], _move(theirs)[keep]
    # a parameter is stored to u of its own size: no update is known better than that
    known = float(np.linalg.norm(theirs.before[keep])) * 2.0**-23
    distance = float(np.linalg.norm(a - b))
    return 0.0 if distance <= known else _finite(_distance(a, b))


def _state_distance(mine: Step, theirs: Step) -> float:
    shared = [key for key in theirs.state if key in mine.state and mine.state[key].shape == theirs.state[key].shape]
    return max((_finite(_distance(mine.state[key], theirs.state[key])) for key in shared), default=0.0)


def _along(difference: Vector, direction: Vector, keep: np.ndarray) -> float:
    """What is left of `difference` outside `direction`, relative; 1 when it points the other way (no shrinking)."""
    d, p = difference[keep], direction[keep]
    size = float(np.linalg.norm(d))
    return math.sqrt(max(0.0, 1 - min(1.0, _cosine(d, p) ** 2))) if size and _cosine(d, p) < 0 else 1.0


def _cosine(a: Vector, b: Vector) -> float:
    sizes = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / sizes if sizes else math.nan


def _total(step: Step, otherwise: Vector) -> Vector:
    """The sum of the window's contributions, as wide as it can be had."""
    return np.sum([b.contribution for b in step.backwards], axis=0) if step.backwards else otherwise


def _low_precision(a: Vector, g: Vector) -> str | None:
    """The 16-bit format that holds every element of `a` while it does not hold those of `g`."""
    for dtype in (torch.bfloat16, torch.float16):
        if _fits_in(a, dtype) and not _fits_in(g, dtype):
            return str(dtype).removeprefix("torch.")
    return None


def _fits_in(values: Vector, dtype: torch.dtype) -> bool:
    tensor = torch.from_numpy(values)
    return bool(torch.equal(tensor.to(dtype).double(), tensor))


def _tensors(track: Track, a: Vector, g: Vector) -> dict[str, tuple[float, float, float]]:
    found = {}
    for name, part in track.slices().items():
        c = compare(torch.from_numpy(a[part]), torch.from_numpy(g[part]))
        found[name] = (c.distance, c.scale, c.cosine)
    return found


def _fits(pair: Pair, t: int, a: Vector, g: Vector, candidate: Run) -> tuple[dict[str, float], tuple[float, ...], float]:
    """How well each simple fault predicts the gradient, and the weights of the right gradient on the contributions."""
    if not (np.isfinite(a).all() and np.isfinite(g).all()) or not g.any() or not a.any():
        return {}, (), math.inf
    mine, n, ranks = pair.mine[t], candidate.accumulation_steps, candidate.ranks
    parts = [b.contribution for b in mine.backwards if np.isfinite(b.contribution).all() and b.contribution.any()]
    k = len(mine.backwards)
    fits = {
        name: _distance(a, f * g)
        for name, f in (("N", n), ("K", k or 1), ("1/N", 1 / n), ("1/K", 1 / (k or 1)), ("K/N", k / n))
        if f
    }
    fits |= {"W": _distance(a, ranks * g), "1/W": _distance(a, g / ranks)} if ranks > 1 else {}
    fits |= _penalty_fits(a, g, mine.before)
    if not parts:
        return fits, (), math.inf
    total = np.sum(parts, axis=0)
    whole = raw(pair.theirs[t])
    fits |= {
        f"sum*{name}": _distance(f * total, whole) for name, f in (("1", 1.0), ("1/N", 1 / n), ("1/K", 1 / k), ("N", float(n)))
    }
    fits["plain_sum"] = _off_line(a, total)
    fits["own_sum"], fits["sums"] = _distance(a, total), _distance(total, _total(pair.theirs[t], g))
    fits["first"], fits["last"] = _off_line(a, parts[0]), _off_line(a, parts[-1])
    cleared = [i for i, b in enumerate(mine.backwards) if b.start == "cleared"]
    if cleared:
        fits["since_clear"] = _off_line(a, np.sum([b.contribution for b in mine.backwards[cleared[-1] :]], axis=0))
    if t > 0:
        fits["stale"] = min(_distance(a, left + total) for left in (pair.mine[t - 1].gradient, raw(pair.mine[t - 1])))
    if len(mine.clips) == 1 and _clipped_once(mine):
        clip = mine.clips[0]
        norm = float(np.linalg.norm(clip.before))
        fits["clipped_then_divided"] = _distance(mine.gradient, clip.before * min(1.0, clip.limit / norm) / n)
    if len(parts) > MOST_PARTS or 2 * len(parts) > g.size:
        return fits, (), math.inf
    found = decompose(torch.from_numpy(g), [torch.from_numpy(p) for p in parts])
    fits["span"] = found.residual
    return fits, tuple(w / len(parts) for w in found.weights), found.condition


def _penalty_fits(a: Vector, g: Vector, parameters: Vector) -> dict[str, float]:
    return {"along_weights": _off_line(a - g, parameters), "along_signs": _off_line(a - g, np.sign(parameters))}


def _off_line(a: Vector, direction: Vector) -> float:
    """||a - its projection on direction|| / ||a||; infinite when they point in opposite directions or one is zero."""
    cosine = _cosine(a, direction)
    if not cosine > 0:
        return math.inf
    rest = a - direction * (float(a @ direction) / float(direction @ direction))
    return float(np.linalg.norm(rest) / np.linalg.norm(a))


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
        reference_pending=len(other.pending),
        windows=tuple(window(mine, theirs) for mine, theirs in aligned),
        repeated=repeated,
        never=never,
        foreign=foreign,
        lrs=tuple(s.lrs for s in pair.mine),
        reference_lrs=tuple(s.lrs for s in pair.theirs),
        schedule_calls=tuple(s.calls.count("schedule") for s in pair.mine),
        reference_schedule_calls=tuple(s.calls.count("schedule") for s in pair.theirs),
        lr_moves_inside=any(len({b.lrs for b in s.backwards} | {s.lrs}) > 1 for s in pair.mine),
        state_steps=tuple(s.state_step for s in pair.mine),
        reference_state_steps=tuple(s.state_step for s in pair.theirs),
        shadow_distances=_shadow_distances(pair),
        shadow_updates=tuple(s.shadow_updates for s in pair.mine),
        reference_shadow_updates=tuple(s.shadow_updates for s in pair.theirs),
        reported=candidate.reported,
        reference_reported=reference.reported,
        losses=tuple(_window_loss(s) for s in pair.mine),
        reference_losses=tuple(_window_loss(s) for s in pair.theirs),
        broken_windows=tuple(t for t, s in enumerate(pair.mine) if _is_broken(s))
        + ((len(pair.mine),) if _any_broken(track) else ()),
        reference_broken=sum(_is_broken(s) for s in pair.theirs) + _any_broken(other),
    )


def _window_loss(step: Step) -> float:
    return sum(b.loss for b in step.backwards)


def _is_broken(step: Step) -> bool:
    contributions = any(not np.isfinite(b.contribution).all() for b in step.backwards)
    return contributions or any(b.broken_forwards for b in step.backwards) or not np.isfinite(step.gradient).all()


def _any_broken(track: Track) -> bool:
    return any(b.broken_forwards or not np.isfinite(b.contribution).all() for b in track.pending)


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
        if mine is None or [s.shape for s in mine.shadows] != [s.shape for s in theirs.shadows]:
            continue
        start = [pair.theirs[0].before] * len(theirs.shadows)
        scale = [float(np.linalg.norm(b - a)) or math.inf for a, b in zip(start, theirs.shadows, strict=True)]
        distance = max(_apart(a, b) / s for a, b, s in zip(mine.shadows, theirs.shadows, scale, strict=True))
        nulls = [n[t] for n in pair.nulls if t < len(n) and [s.shape for s in n[t].shadows] == [s.shape for s in theirs.shadows]]
        null = max(
            (_apart(a, b) / s for n in nulls for a, b, s in zip(n.shadows, theirs.shadows, scale, strict=True)), default=0.0
        )
        found.append((t, distance, max(FACTOR * null, 1 / NOISE)))
    return tuple(found)


def _apart(a: Vector, b: Vector) -> float:
    return float(np.linalg.norm(a - b))
