"""Rung 2: is the gradient at the step the sum of what the micro-batches gave; if not, what happened to it in between?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from accumulation_harness.compare.linear import norm, proportion, weighted_sum
from accumulation_harness.compare.readings import listed
from accumulation_harness.judge.cause import Cause
from accumulation_harness.watch.evidence import CLIPS, Finding, Group, MicroBatch, Remark, Sketch, Window

GATE = 1e-4  # of the sketch error, relative to the parts: float32 sums and sketches stay a hundred times below
NARROW_GATE = 2e-2  # where gradients are kept in 16 bits
CLEARED = 1e-6
MOST_TIMES = 3  # that a micro-batch may be counted, to be no weight of a loss
OF_ONE = 0.1  # what counts of the error of one tensor alone
SMALLEST = 1e-12  # of all, below which numbers of one tensor have few digits
ALIKE = 1e-3  # relative difference of two factors that are one
OF_WEIGHTS = (Cause.clip_per_micro_batch, Cause.sum_rescaled_in_window)  # parts count unequally, and nothing else is wrong


@dataclass(kw_only=True)
class Sum:
    """How a window's gradient compares with its parts."""

    error: float = float("nan")
    factor: float = 1.0  # of the gradient at the step on each part; over all ranks
    weights: tuple[float, ...] = ()  # of each part, where they differ and are known
    unequal: Finding | None = (
        None  # parts that count unequally: a fault unless their losses weigh the other way around, or are none
    )
    right: bool = False  # the sum of all parts, perhaps scaled as a whole
    suspicious: bool = False  # wrong, and this window was not looked at closely enough to say why
    findings: list[Finding] = field(default_factory=list)
    remark: Remark | None = None  # why it was not seen; or a doubt: something is off, and has no name


def summed(window: Window, last: Window | None) -> Sum:
    """Ask whether the gradient at the step is the sum of what the backwards of the window gave.

    Args:
        window: The window.
        last: The window before it.

    Returns:
        The sum, with findings and a remark.
    """
    parts = [m.contribution for m in window.micro_batches]
    if not window.alone and window.ranks is None:  # what the other ranks gave is looked at in a sample of windows
        between = _inside(window, parts, GATE, float("nan"))
        return Sum(findings=[] if between is None else [between])
    if not all(np.isfinite(part).all() for part in parts):
        return _non_finite(window, parts)
    total: Sketch = np.sum(parts, axis=0)
    gradient, gate = window.gradient, _narrow_gate(len(parts)) if window.narrow else GATE
    if not np.isfinite(gradient).all():
        return Sum(remark=Remark.step_not_finite)
    size = max(norm(total), float(np.sqrt(sum(np.square(part).sum() for part in parts))))
    if not size:
        return Sum(remark=Remark.no_gradient)
    if window.ranks is not None:
        return _over_ranks(window, [_over_group(window, one, last, parts, gate) for one in window.ranks.groups])
    found = Sum(error=apart(gradient, total, parts))
    if found.error <= gate:
        found.right = True
        return found
    factor, _ = proportion(gradient, total)
    if factor > 0 and apart(gradient / factor, total, parts) <= gate:
        found.factor, found.right = factor, True
        return found
    if window.moved:
        found.remark = Remark.moved_inside
    elif (why := _why(window, last, parts, gate, size, found)) is not None:
        if why.cause in OF_WEIGHTS:
            found.weights = found.weights or _weights(window, parts, gate)
        if why.cause in OF_WEIGHTS and found.weights:
            found.unequal = why
        else:
            found.findings.append(why)
    else:  # `unexplained` is no finding here: the sum may be kept elsewhere, in a way that is right
        found.remark = Remark.changed
    return found


def apart(gradient: Sketch, total: Sketch, parts: Sequence[Sketch]) -> float:
    """Measure how far a gradient is from a sum; of one tensor, which has fewer numbers, a tenth of that counts.

    Args:
        gradient: The gradient.
        total: The sum.
        parts: What was added up.

    Returns:
        The distance, relative to the parts.
    """
    sizes = [np.linalg.norm(total, axis=1), np.sqrt(sum(np.square(part).sum(axis=1) for part in parts))]
    of_each, apart = np.maximum(*sizes), np.linalg.norm(gradient - total, axis=1)
    size, there = norm(of_each), of_each > SMALLEST * norm(of_each)
    return float(max(norm(apart) / size, *(OF_ONE * apart[there] / of_each[there])))


def _narrow_gate(num: int) -> float:
    """Where sums are kept in 16 bits: each of `num` additions rounds by u = 2^-8 of the sum at most, by chance up or down."""
    return max(NARROW_GATE, 1.5 * 2.0**-8 * float(np.sqrt(num)))


def _why(window: Window, last: Window | None, parts: list[Sketch], gate: float, size: float, found: Sum) -> Finding | None:
    """Something is lost, added or scaled: named only where it reproduces the gradient at the step."""
    first, total = window.micro_batches[0], np.sum(parts, axis=0)
    if first.before is not None and norm(first.before) > gate * size:
        if proportion(window.gradient, total + first.before)[1] <= 10 * gate:
            return _carried(window, last, first.before, size) or _foreign(window, first.before, size)
    elif first.before is None and not first.empty:
        left = _carried(window, last, window.gradient - total, size)
        if left is not None:
            return left
    scales = [m.scale for m in window.micro_batches]
    if max(scales) > min(scales):
        message = f"the loss scale is {scales[0]:g} in the first micro-batch and {scales[-1]:g} in the last"
        return _finding(Cause.scaler_updated_in_window, window, message, found.error)
    inside = _inside(window, parts, gate, found.error)
    if inside is not None:
        return inside
    named = _by_weights(window, parts, gate, found)
    found.suspicious = named is None and not window.looked_into
    return named


def _inside(window: Window, parts: list[Sketch], gate: float, error: float) -> Finding | None:
    """What happened to `.grad` before the last backward ended, if it is what the step took."""
    ends = window.micro_batches[-1].after
    if ends is None or not window.looked_into or any(m.returned for m in window.micro_batches):
        return None  # of gradients that are put together by hand, the weights tell
    cause, message = _between(window, gate)
    if cause is Cause.gradients_cleared_in_window and proportion(window.gradient, _since_cleared(window))[1] > 10 * gate:
        return None  # what came before counts: it was put back, say
    _, off = proportion(window.gradient, ends)
    after_all = {  # also after the last backward
        Cause.low_precision_accumulator: off <= NARROW_GATE,
        Cause.weight_decay_per_micro_batch: is_of_weights(window.parameters, window.gradient - np.sum(parts, axis=0)),
    }
    named = cause is not None and (off <= 10 * gate or after_all.get(cause, False))
    return _finding(cause, window, message, error) if cause is not None and named else None


def _since_cleared(window: Window) -> Sketch:
    """What backwards have added to each tensor's `.grad` (on ranks: of all of them) since it was last found empty."""
    total: Sketch = np.zeros_like(window.gradient)
    for m in window.micro_batches:
        before = np.broadcast_to(_there(m.before), total.shape)
        total = np.where(before.any(axis=1, keepdims=True), total, 0.0) + _there(m.after) - before
    return total


def _between(window: Window, gate: float) -> tuple[Cause | None, str]:
    """Find what first happened to `.grad` between two backwards.

    Of what happens inside of one the weights tell; and there ranks may be synchronised.

    Returns:
        The cause and a sentence; None and an empty text where nothing happened or it is not known.
    """
    last: Sketch | None = None
    for k, m in enumerate(window.micro_batches):
        if last is not None and (changed := _change(window, last, _there(m.before) * m.scale, m, k, gate)) is not None:
            return changed
        last = _there(m.after) * m.scale
    return None, ""


def _there(gradient: Sketch | None) -> Sketch:
    return np.zeros((1, 1)) if gradient is None else gradient


def _change(window: Window, a: Sketch, b: Sketch, this: MicroBatch, k: int, gate: float) -> tuple[Cause | None, str] | None:
    """What happened to `.grad`, from `a` to `b`, between two backwards of a window; None: nothing."""
    a, b = np.broadcast_arrays(a, b)
    moved = np.linalg.norm(b - a, axis=1) > gate / 10 * np.maximum(np.linalg.norm(a, axis=1), OF_ONE * gate * norm(a))
    size, tensors = norm(a), f"{moved.sum()} of {len(moved)} tensors"
    if not size or not moved.any():
        return None
    where = f"between micro-batches {k} and {k + 1}" + ("" if moved.all() else f", of {tensors}")
    a, b = a[moved], b[moved]
    if norm(b) <= CLEARED * norm(a):
        return Cause.gradients_cleared_in_window, f"`.grad` is zero after it was filled, {where}"
    if CLIPS & {*this.calls}:
        return Cause.clip_per_micro_batch, f"gradients are clipped {where}"
    factor, off = proportion(b, a)
    if off <= 10 * gate:
        if "unscale" in this.calls:
            return Cause.scaler_updated_in_window, f"gradients are unscaled {where}"
        factors = [proportion(y.before[moved] * y.scale, x.after[moved] * x.scale)[0]
                   for x, y in pairwise(window.micro_batches) if y.before is not None and x.after is not None]  # fmt: skip
        if len(factors) > 1 and max(factors) - min(factors) > ALIKE and max(factors) <= 1 + ALIKE:
            return Cause.clip_per_micro_batch, f"gradients shrink by unequal factors inside the window ({listed(factors)})"
        return Cause.sum_rescaled_in_window, f"`.grad` is multiplied by {factor:.4g} {where}"
    if window.parameters is not None and is_of_weights(window.parameters[moved], b - a):
        return Cause.weight_decay_per_micro_batch, f"a multiple of the weights is added to `.grad` {where}"
    if window.rounded:
        return Cause.low_precision_accumulator, f"the sum so far is rounded to {window.rounded} {where}"
    return None, ""


def is_of_weights(weights: Sketch | None, added: Sketch) -> bool:
    """Decide whether what was added to the gradient is a multiple of the weights.

    Args:
        weights: Of the weights; None where they were not looked at.
        added: What was added.

    Returns:
        True if it is.
    """
    return weights is not None and proportion(added, weights)[1] <= 1e-2


def _weights(window: Window, parts: list[Sketch], gate: float) -> tuple[float, ...]:
    """The weight of each part in the gradient at the step, by least squares; none where it is no such sum."""
    seen = np.any([part.any(axis=1) for part in (window.gradient, *parts)], axis=0)
    made = weighted_sum(window.gradient[seen], [part[seen] for part in parts])
    return made.weights if len(parts) > 1 and made.told_apart and made.residual <= gate else ()


def _by_weights(window: Window, parts: list[Sketch], gate: float, found: Sum) -> Finding | None:
    """What the weight of each part in the gradient at the step means."""
    found.weights = _weights(window, parts, gate)
    if not found.weights:
        return None
    weights = np.array(found.weights)
    shares = weights / np.abs(weights).max()
    kept, message = np.abs(shares) >= 1e-2, f"micro-batches count {listed(shares)} of what the largest does"
    if any(CLIPS & {*m.calls} for m in window.micro_batches[1:]):
        return _finding(Cause.clip_per_micro_batch, window, message, found.error)
    ratios = shares[1:] / shares[:-1] if kept.all() else np.array([])
    if len(ratios) > 1 and np.ptp(shares) > 1e-2 and np.ptp(ratios) <= 1e-2 * np.abs(ratios).max():
        return _finding(Cause.sum_rescaled_in_window, window, message, found.error)
    times = shares / min(np.abs(shares[kept]))  # no weighting of a loss loses micro-batches, counts them twice or subtracts them
    again = any(proportion(parts[k], parts[j])[1] <= ALIKE for k in np.flatnonzero(~kept) for j in np.flatnonzero(kept))
    if again or np.abs(times).max() > MOST_TIMES or np.abs(times - times.round()).max() > 1e-2:
        return None  # the same rows were differentiated twice, and count once; or it is a weighting
    cause = Cause.unexplained if {*times.round()} - {0, 1} else Cause.micro_batches_lost
    if kept.all() and cause is Cause.micro_batches_lost:
        return None
    one = _finding(cause, window, f"micro-batches count {listed(times.round() + 0.0)} times", found.error)
    first, last = np.flatnonzero(kept)[[0, -1]]
    if last - first + 1 == kept.sum() and cause is Cause.micro_batches_lost and (not first or last == len(parts) - 1):
        return one
    found.unequal = one if len(parts) > 2 else None  # inner steps may be taken between those of the loss
    return None


def _carried(window: Window, last: Window | None, carried: Sketch, size: float) -> Finding | None:
    """What some tensors have at the window's beginning, if it is what they had at the end of the one before."""
    known = [] if last is None else [s for s in (last.gradient, last.at_step) if s is not None]
    there = np.linalg.norm(carried, axis=1) > GATE * size
    for before in known:
        seen = before.any(axis=1) & there  # not all tensors are looked at in every window
        factor, off = proportion(carried[seen], before[seen])
        if seen.any() and off <= ALIKE:
            of = "" if there.all() else f" in {there.sum()} of {len(there)} tensors"
            message = f"`.grad` begins with {factor:.3g} times the gradient of the window before{of}"
            return _finding(Cause.gradients_not_cleared, window, message, norm(carried) / size)
    return None


def _foreign(window: Window, carried: Sketch, size: float) -> Finding:
    message = "`.grad` holds something before the first backward of the window that is not the last window's gradient"
    return _finding(Cause.foreign_gradients, window, message, norm(carried) / size)


def _non_finite(window: Window, parts: list[Sketch]) -> Sum:
    if np.isfinite(window.gradient).all() and not window.skipped:
        bad = [k + 1 for k, part in enumerate(parts) if not np.isfinite(part).all()]
        message = f"micro-batch {', '.join(map(str, bad))} gave a gradient that is not finite, and the step was taken on the rest"
        return Sum(findings=[_finding(Cause.non_finite_micro_batch, window, message, float("nan"))])
    return Sum(remark=Remark.part_not_finite)


def _over_ranks(window: Window, sums: Sequence[Sum]) -> Sum:
    """Of tensors that other ranks share; all are multiplied by one factor, whoever shares them."""
    seen = [one for one in sums if one.remark is not Remark.no_gradient] or sums
    for one in seen:
        if not one.right or abs(one.factor / seen[0].factor - 1) <= ALIKE:
            continue
        factors = f"{one.factor:.4g} times the sum over their ranks, of others {seen[0].factor:.4g} times"
        message = f"gradients of some tensors are {factors}"
        return Sum(error=one.error, findings=[_finding(Cause.replica_scale, window, message, one.error)])
    return next((one for one in seen if not one.right), seen[0])


def _over_group(window: Window, group: Group, last: Window | None, parts: list[Sketch], gate: float) -> Sum:
    """The gradient at the step is one multiple of the sum over ranks, the same in all replicas."""
    given, gradients, before = group.contributions, group.gradients, group.before
    if not all(np.isfinite(g).all() for g in (*given, *gradients, *before)):
        return Sum(remark=Remark.ranks_unseen)
    gradient, total = gradients[0], np.sum(given, axis=0)
    size = max(norm(total), *(norm(part) for part in given))
    if not size:
        return Sum(remark=Remark.no_gradient)
    apart = max(norm(g - gradient) for g in gradients)
    if apart > 10 * gate * size:
        message = f"gradients at the step differ between ranks by {apart / size:.2g} of a rank's norm"
        if len(gradients) == len(given) and all(
            proportion(g, part)[1] <= 10 * gate for g, part in zip(gradients, given, strict=True)
        ):
            message += ": each rank steps on its own"
        return Sum(findings=[_finding(Cause.replicas_not_synchronised, window, message, apart / size)])
    factor, off = proportion(gradient, total)
    factor = next((usual for usual in (1.0, 1 / len(given)) if abs(factor / usual - 1) <= off), factor)  # as far as it is known
    error = norm(gradient - total / len(given)) / size
    if factor > 0 and off * norm(gradient) <= 10 * gate * size * max(factor, 1 / len(given)):
        return Sum(error=error, factor=factor, right=True)
    first = window.micro_batches[0].before
    if norm(before[0]) > gate * size and first is not None and proportion(gradient - before[0], total)[1] <= 10 * gate:
        return Sum(error=error, findings=[_carried(window, last, first, size) or _foreign(window, before[0], size)])
    inside = _inside(window, parts, gate, error)
    if inside is not None:
        return Sum(error=error, findings=[inside])
    return Sum(error=error, suspicious=True, remark=Remark.no_multiple)


def _finding(cause: Cause, window: Window, message: str, error: float) -> Finding:
    return Finding(cause=cause, message=message, window=window.index, rung="sketch", evidence={"sketch error": error})
