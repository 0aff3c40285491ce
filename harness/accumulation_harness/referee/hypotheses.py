"""Exact oracles of causes: what the consumed gradient would be if a known fault were there.

Each hypothesis is the textbook description of a fault, evaluated in float64 on the referee's micro-batch gradients; nothing here
runs the loop under test. A cause may have several variants and explains an arm when, in *every* probed window where the arm is
wrong, one of them reproduces the consumed gradient within the gate of L0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.gates import ALGEBRA_GATE
from accumulation_harness.referee.gradients import decompose, relative_distance
from accumulation_harness.referee.oracle import CLIP_EPSILON, Parts, clipped, summed

MISCOUNTED = (
    0.25  # of the window's loss terms, by how many another number of them may be off: beyond it, factors look like counts
)
RESCALED = 1e-3  # relative, by what a sum is multiplied in each micro-batch at least
Hypothesis = tuple[Cause, Tensor]  # (cause, gradient [P] that would have been consumed)


@dataclass(frozen=True, kw_only=True)
class WindowFacts:
    """What a hypothesis about a wrong gradient may know of a window."""

    parts: Parts  # the referee's micro-batch gradients: means over each micro-batch's loss terms
    configured_steps: int  # N; a short window has fewer parts
    configured_terms: float  # loss terms of a full window; for text its samples times this window's mean per sample
    max_norm: float | None  # of clipping
    clip_epsilon: float = CLIP_EPSILON
    loss_scale: float  # of the scaler; 1 without one
    left_over: Tensor | None  # gradients that were there before the first backward
    consumed_before: Tensor | None  # what the optimizer consumed in the window before this one
    penalty: Tensor | None = None  # gradient of the penalty alone, where the objective has one
    decay: Tensor | None = None  # weight decay times the weights: what an L2 term adds to the gradient
    earlier: Iterable[Parts] = ()  # `parts` at the weights of earlier windows
    tensors: Sequence[int] = ()  # entries of each parameter tensor, in order
    tells_counts: bool = True  # whether the format tells one number of loss terms from the next

    def clipped(self, gradient: Tensor) -> Tensor:
        """As the arm clips at the end of the window."""
        return clipped(gradient, self.max_norm, self.clip_epsilon)


def hypotheses(facts: WindowFacts) -> Iterator[Hypothesis]:
    """Yield every hypothesis about a wrong gradient that applies to a window.

    Args:
        facts: The window.

    Yields:
        A cause, and the gradient [P] that it predicts, after clipping.
    """
    for cause, gradient in _unclipped(facts):
        yield cause, facts.clipped(gradient)
    if facts.max_norm is not None and math.isfinite(facts.max_norm):
        yield from clipping(facts)


def _unclipped(facts: WindowFacts) -> Iterator[Hypothesis]:
    """Predict the accumulated gradient before a correct clip, under each known fault.

    Args:
        facts: The window: g_k mean gradients, n_k loss terms of its micro-batches, W their sum, N.

    Yields:
        A cause and [P] float64.
    """
    g, n, num = facts.parts.parts, facts.parts.terms, facts.configured_steps
    total = sum(n)
    shares = facts.parts.shares
    means = summed(g)
    right = summed(shares)
    # with N as configured, and as the window has it
    often = ((means, 1), (right, total), (right, num), (right, len(g)))
    yield from ((Cause.loss_not_divided, one * factor) for one, factor in often)
    twice = ((means, num * len(g)), (means, len(g) ** 2), (means, num**2), (right, num), (right, len(g)))
    yield from ((Cause.loss_divided_twice, one / divisor) for one, divisor in twice)
    yield Cause.mean_of_means, means / len(g)
    if len(g) < num:
        for short in (means / num, right * (len(g) / num), right * (total / facts.configured_terms)):
            yield Cause.short_window_divided_by_n, short
    for cause, kept in ((Cause.gradients_cleared_in_window, -1), (Cause.micro_batches_lost, 0)):
        for alone in (shares[kept], g[kept] / num, g[kept]):
            yield cause, alone
    yield Cause.gradients_cleared_in_window, torch.zeros_like(right)
    for lost in range(1, len(g) - 1):
        for cause in (Cause.gradients_cleared_in_window, Cause.resume_in_window):
            yield cause, summed(shares[lost:])
    if facts.left_over is not None:
        for cause in _origins(facts):
            for factor in (1.0, facts.loss_scale):  # added before unscaling
                yield cause, right + facts.left_over / factor
    elif facts.consumed_before is not None:  # in a sum of the loop's own
        yield Cause.gradients_not_cleared, right + facts.consumed_before
    if facts.penalty is not None:
        # How often it may be in a gradient that should have it once: too often, too seldom, or not at all.
        for times in (len(g), total, len(g) / num, 1 / num, 1 / num**2, 1 / total, len(g) / total, 0.0):
            yield Cause.auxiliary_loss_scale, right + (times - 1) * facts.penalty
    if facts.decay is not None:
        for times in (len(g) - 1, len(g)):
            yield Cause.weight_decay_per_micro_batch, right + times * facts.decay
    for gradient in _doubled_scale(shares, num) if facts.loss_scale != 1 else ():  # without a scaler it is 1
        yield Cause.scaler_updated_in_window, gradient
    for divided, summands in ((1, shares), (num, g), (total, [part * count for part, count in zip(g, n, strict=True)])):
        for gradient in _low_precision(summands):
            yield Cause.low_precision_accumulator, gradient / divided


def counted(facts: WindowFacts, consumed: Tensor) -> Iterator[Hypothesis]:
    """Yield hypotheses with a number that is read from the gradient: a count, a divisor, a limit of clipping, a factor.

    Args:
        facts: The window.
        consumed: [P] the gradient that the optimizer received, from which the number is estimated.

    Yields:
        A cause, and the gradient [P] that it predicts; nothing where clipping has changed the numbers.
    """
    if facts.max_norm is not None:
        return
    right, total = facts.parts.gradient, sum(facts.parts.terms)
    shares = facts.parts.shares
    weights = [weight / len(shares) for weight in decompose(consumed, shares).weights]
    yield from _whole_times(shares, weights)
    yield from ((Cause.clip_per_micro_batch, gradient) for gradient in _clipped_somewhere(shares, weights, consumed))
    ratio = weights[0] / weights[1] if len(weights) > 2 and min(weights) > 0 else 1.0  # two have always a ratio
    if not math.isclose(ratio, 1.0, rel_tol=RESCALED):
        powers = [weights[-1] * ratio**k for k in reversed(range(len(shares)))]
        yield Cause.sum_rescaled_in_window, summed(share * power for share, power in zip(shares, powers, strict=True))
    product = float(consumed @ right)
    if product > 0 and float(total).is_integer() and facts.tells_counts:
        divisor = round(total * float(right @ right) / product)
        if divisor != total and abs(divisor - total) <= MISCOUNTED * total:
            yield Cause.counter_wrong, right * (total / divisor)


def _whole_times(shares: Sequence[Tensor], weights: Sequence[float]) -> Iterator[Hypothesis]:
    """Micro-batches that count a whole number of times, some of them not at all or several times."""
    times = [round(weight) if math.isfinite(weight) else 0 for weight in weights]
    repeated, lost = min(times) == 1 < max(times), min(times) == 0 < max(times) == 1
    if repeated or lost:
        cause = Cause.samples_repeated if repeated else Cause.micro_batches_lost
        yield cause, summed(share * num for share, num in zip(shares, times, strict=True))


def partly(facts: WindowFacts, consumed: Tensor) -> Iterator[Hypothesis]:
    """Yield hypotheses that concern some tensors only.

    A prediction is taken for the tensors that it brings nearer to the gradient, and the right gradient for the others. A
    gradient of zero in a tensor is no evidence that it was cleared, because the tensor may be frozen.

    Args:
        facts: The window.
        consumed: [P] the gradient that the optimizer received.

    Yields:
        A cause, and the gradient [P] that it predicts.
    """
    right = facts.clipped(facts.parts.gradient).split(list(facts.tensors))
    own = consumed.split(list(facts.tensors))
    for cause, gradient in hypotheses(facts):
        chosen = [
            wrong if wrong.count_nonzero() and (a - wrong).norm() < (a - g).norm() else g
            for a, g, wrong in zip(own, right, gradient.split(list(facts.tensors)), strict=True)
        ]
        yield cause, torch.cat(chosen)
    off = [k for k, (a, g) in enumerate(zip(own, right, strict=True)) if (a - g).norm() > ALGEBRA_GATE * g.norm()]
    if facts.max_norm is None and 0 < len(off) < len(own):
        shares = [torch.cat([share.split(list(facts.tensors))[k] for k in off]) for share in facts.parts.shares]
        weights = [weight / len(shares) for weight in decompose(torch.cat([own[k] for k in off]), shares).weights]
        for cause, found in _whole_times(shares, weights):
            pieces = dict(zip(off, found.split([facts.tensors[k] for k in off]), strict=True))
            yield cause, torch.cat([pieces.get(k, g) for k, g in enumerate(right)])


def _origins(facts: WindowFacts) -> Iterator[Cause]:
    """Gradients left over are somebody else's, or, where they are along them, the last window's, in some tensors perhaps."""
    assert facts.left_over is not None
    yield Cause.foreign_gradients
    if facts.consumed_before is None:
        return
    sizes = list(facts.tensors) or [len(facts.left_over)]
    pairs = zip(facts.left_over.split(sizes), facts.consumed_before.split(sizes), strict=True)
    left = [(old, before) for old, before in pairs if old.count_nonzero()]
    # A tensor of one entry is along any other.
    known = any(len(old) > 1 for old, _ in left) and all(_along(old, before) for old, before in left)
    if known:
        yield Cause.gradients_not_cleared


def _along(a: Tensor, b: Tensor) -> bool:
    """Whether a is a positive multiple of b."""
    scale = torch.linalg.vector_norm(a) / torch.linalg.vector_norm(b)
    return bool(torch.isfinite(scale)) and relative_distance(a, scale * b) < ALGEBRA_GATE


def stale(facts: WindowFacts) -> Iterator[Hypothesis]:
    """Yield hypotheses of a forward pass with weights of an earlier window.

    Args:
        facts: The window, with the micro-batch gradients at earlier weights.

    Yields:
        A cause, and the gradient [P] with old weights in the first micro-batches, or in the last ones, however many.
    """
    fresh = facts.parts.shares
    for old in (parts.shares for parts in facts.earlier):
        for k in range(len(fresh)):
            for shares in ([*old[: k + 1], *fresh[k + 1 :]], [*fresh[:k], *old[k:]]):
                yield Cause.cached_weights_stale, facts.clipped(summed(shares))


def clipping(facts: WindowFacts) -> Iterator[Hypothesis]:
    """Predict the gradient when it is clipped at the wrong place or on the wrong scale.

    Args:
        facts: The window.

    Yields:
        A cause and [P] float64.
    """
    shares, num = facts.parts.shares, facts.configured_steps
    right = summed(shares)
    for gradient in _clipped_within(shares, facts.clipped, facts.loss_scale):
        yield from ((Cause.clip_per_micro_batch, one) for one in (gradient, facts.clipped(gradient)))
    means = summed(facts.parts.parts)
    undivided = summed([facts.clipped(part) for part in facts.parts.parts])
    scales = (facts.loss_scale, num, len(shares), sum(facts.parts.terms))
    early = [
        (right, num, 1),
        *((means, 1, divisor) for divisor in (num, len(shares))),
        *((right, scale, scale) for scale in scales),
    ]
    yield from ((Cause.clip_before_unscale, facts.clipped(one * scale) / divisor) for one, scale, divisor in early)
    yield from ((Cause.clip_per_micro_batch, undivided / divisor) for divisor in (num, len(shares)))


def _clipped_within(shares: Sequence[Tensor], clip: Callable[[Tensor], Tensor], loss_scale: float = 1.0) -> Iterator[Tensor]:
    """Predict the gradient when its sum is clipped after every backward, each micro-batch is, or the first ones are.

    Args:
        shares: [P] rightful contribution of each micro-batch.
        clip: Clips a gradient.
        loss_scale: Of the scaler; 1 without one.

    Yields:
        [P] float64.
    """
    for scale in {1.0, loss_scale}:
        yield clip(_running(shares, clip, scale)) / scale
    yield summed([clip(share) for share in shares])
    for k in range(1, len(shares)):
        yield clip(summed(shares[:k])) + summed(shares[k:])


def _running(shares: Sequence[Tensor], clip: Callable[[Tensor], Tensor], scale: float = 1.0) -> Tensor:
    """[P] the sum that is clipped after every backward but the last."""
    running = torch.zeros_like(shares[0])
    for share in shares:
        running = clip(running) + scale * share
    return running


def _clipped_somewhere(shares: Sequence[Tensor], weights: Sequence[float], consumed: Tensor) -> Iterator[Tensor]:
    """`_clipped_within` a limit that the trial does not know: the length of what is longest, or of the sum.

    Args:
        shares: [P] rightful contribution of each micro-batch.
        weights: With which each is in `consumed`, 1 where it is right.
        consumed: [P] the gradient that the optimizer received.

    Yields:
        [P] float64.
    """
    lengths = [float(torch.linalg.vector_norm(share)) for share in shares]
    length = last = float(torch.linalg.vector_norm(consumed))
    for _ in range(3):  # what is clipped is shorter than the limit by the epsilon, relative to what it was
        running = _running(shares, partial(clipped, max_norm=last))
        last = length * (1 + CLIP_EPSILON / (float(torch.linalg.vector_norm(running)) or math.inf))
    for limit in (last, max(weight * (own + CLIP_EPSILON) for weight, own in zip(weights, lengths, strict=True))):
        if sum(own > limit for own in lengths) > 1:  # one alone may have any weight
            yield from _clipped_within(shares, partial(clipped, max_norm=limit))


def _doubled_scale(shares: Sequence[Tensor], num: int) -> Iterator[Tensor]:
    """Predict the gradient when the loss scale doubles (or halves) inside the window, after micro-batch k.

    Args:
        shares: [P] rightful contribution of each micro-batch.
        num: Micro-batches of a full window: in a short one the last may be the k-th.

    Yields:
        [P] float64: the sum divided by the last scale.
    """
    for k in range(1, len(shares) + (len(shares) < num)):
        early, late = summed(shares[:k]), summed(shares[k:]) if shares[k:] else 0.0
        yield early / 2 + late
        yield early * 2 + late
    growing = [share * 2.0 ** (k + 1 - len(shares)) for k, share in enumerate(shares)]
    yield summed(growing)


def _low_precision(shares: Sequence[Tensor]) -> Iterator[Tensor]:
    """Predict the gradient when the running sum is kept in a narrow format.

    It is rounded after every addition; or each gradient is, before that; or both.

    Args:
        shares: [P] rightful contribution of each micro-batch.

    Yields:
        [P] float64.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        running = torch.zeros_like(shares[0])
        for share in shares:
            running = (running + share).to(dtype).double()
        yield running
        narrow = torch.zeros_like(shares[0], dtype=dtype)
        for share in shares:
            narrow = narrow + share.to(dtype)
        yield narrow.double()
        yield summed([share.to(dtype).double() for share in shares])
