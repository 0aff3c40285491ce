"""The float64 referee: gradients by a path that shares nothing with the loop under test.

One forward over the whole window of a model of its own, at weights and buffers that are put there, per-sample losses, and
`torch.autograd.grad`: no `.grad` accumulation, no optimizer, no autocast, no state from one gradient to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from accumulation_harness.referee.gradients import flatten
from accumulation_harness.system import pytree
from accumulation_harness.workloads import Batch, Workload

CARRIED = "attributes_that_forwards_move"
CLIP_EPSILON = 1e-6  # of `torch.nn.utils.clip_grad_norm_`
LEAST_AT_ONCE = 2**22  # elements of all parts that may lie in memory together, however small the model
State = dict[str, Tensor]  # parameters and buffers by name, floating ones in float64


def mark_carried(model: nn.Module, names: Sequence[str]) -> None:
    """Mark attributes of a model's layers as state that a training forward changes.

    Args:
        model: The model.
        names: Paths of the attributes (`layers.0.calls`), tensors or numbers.
    """
    vars(model)[CARRIED] = tuple(names)


def snapshot(model: nn.Module) -> State:
    """Copy the parameters, buffers and other state of a model.

    Args:
        model: The model, which is left unchanged.

    Returns:
        By name, copies; floating-point values are in float64.
    """
    attributes = ((name, torch.as_tensor(vars(owner)[own])) for name, owner, own in _carried(model))
    return {name: value.detach().to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)
            for name, value in (*model.named_parameters(), *model.named_buffers(), *attributes)}  # fmt: skip


def restore(model: nn.Module, state: State) -> None:
    """Put the values of a snapshot into a model, in place.

    Args:
        model: The model.
        state: A snapshot of it.
    """
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.copy_(state[name])
    for name, owner, own in _carried(model):
        value = vars(owner)[own]
        vars(owner)[own] = state[name].to(value, copy=True) if isinstance(value, Tensor) else type(value)(state[name].item())


def _carried(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for name in vars(model).get(CARRIED, ()):
        layer, _, own = name.rpartition(".")
        yield name, model.get_submodule(layer), own


def clipped(gradient: Tensor, max_norm: float | None, epsilon: float = CLIP_EPSILON) -> Tensor:
    """Clip a gradient by its norm as PyTorch does, g * min(1, max_norm / (||g|| + epsilon)).

    Args:
        gradient: [P] g.
        max_norm: The limit; None for no clipping.
        epsilon: PyTorch's, or 0 as one clips by hand.

    Returns:
        [P] the clipped gradient.
    """
    if max_norm is None:
        return gradient
    return gradient * torch.clamp(max_norm / (torch.linalg.vector_norm(gradient) + epsilon), max=1.0)


def no_clipping(max_norm: float | None) -> float | None:
    """Return the limit that switches clipping off.

    Args:
        max_norm: The configured limit, or None.

    Returns:
        Infinity if one is configured, since a loop may rely on there being a limit; otherwise None.
    """
    return None if max_norm is None else math.inf


def summed(vectors: Iterable[Tensor]) -> Tensor:
    """Add vectors, with one of them in memory besides the sum.

    Args:
        vectors: [P] each.

    Returns:
        [P] their sum.
    """
    rest = iter(vectors)
    total = next(rest).clone()
    for vector in rest:
        total += vector
    return total


@dataclass(frozen=True)
class Parts:
    """The large batch's gradient as a sum over micro-batches, gradient = sum_k terms[k] / sum(terms) * parts[k]."""

    parts: tuple[Tensor, ...]  # [P] each: gradient of micro-batch k's mean loss, with the full batch's forward
    terms: tuple[float, ...]  # whole numbers, unless terms are weighted

    @property
    def shares(self) -> list[Tensor]:
        """[P] each: what a micro-batch rightly contributes, terms[k] / sum(terms) * parts[k]."""
        return list(self.shares_of(range(len(self.parts))))

    def shares_of(self, places: Iterable[int]) -> Iterator[Tensor]:
        """The shares of some micro-batches, each made when it is asked for."""
        total = sum(self.terms)
        return (self.parts[k] * (self.terms[k] / total) for k in places)

    @property
    def gradient(self) -> Tensor:
        """[P] the full batch's gradient."""
        return summed(self.shares_of(range(len(self.parts))))


@dataclass(frozen=True)
class Loss:
    """The value of a window's objective."""

    value: float
    magnitude: float  # the same of the terms' absolute values: what rounding is relative to where they cancel

    def error(self, reported: float) -> float:
        """Compute the error of a reported loss.

        Args:
            reported: The loss that a loop reports.

        Returns:
            |reported - value| / magnitude; 0 if both are zero.
        """
        return 0.0 if reported == self.value else abs(reported - self.value) / self.magnitude if self.magnitude else math.inf


@dataclass(frozen=True)
class Inside:
    """What is computed within each micro-batch, although the large batch computes it over the window."""

    statistics: bool = False  # of BatchNorm, and what else a forward takes from its rows or leaves to the next one
    loss: bool = False  # of a loss whose terms depend on other samples
    draws: bool = False  # of random numbers: each forward makes its own


WHOLE = Inside()


class Referee:
    """Computes exact gradients, in float64, of the mean loss over a window's loss terms."""

    def __init__(self, workload: Workload, model: nn.Module, keep: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        """Create a referee.

        Args:
            workload: The workload in float64.
            model: A float64 model of the referee's own, into which values are put before each forward.
            keep: Returns a tensor of the same values; where the micro-batch gradients are kept.
        """
        self.workload = workload
        self.model, self._keep = model.train(), keep
        self.names = [name for name, _ in model.named_parameters()]

    def gradient(self, state: State, window: Batch) -> Tensor:
        """Compute the gradient of a window in one forward pass.

        Args:
            state: The values of parameters and buffers.
            window: The window.

        Returns:
            [P] the gradient of sum(losses) / sum(terms).
        """
        return self.within(state, window, [len(window)], WHOLE)[1]

    def within(self, state: State, window: Batch, sizes: Sequence[int], inside: Inside) -> tuple[Loss, Tensor, Tensor]:
        """Compute the objective sum_i l_i / sum_i n_i + penalty and its gradient with something computed within chunks.

        Hoffer et al. 2017 for BatchNorm: chunk k is normalised by its own statistics and moves the running statistics in
        turn. Accumulation over micro-batches of the same sizes is this computation exactly.

        Args:
            state: Parameters and buffers to start from.
            window: All of its samples.
            sizes: Samples in each chunk; they add up to the window's.
            inside: What is computed within chunks.

        Returns:
            The loss; [P] float64 gradient of the mean over the window's loss terms; the running statistics afterwards.
        """
        losses = self._losses(state, window, sizes, inside)
        shares, penalty = losses / self.workload.num_terms(window).sum(), self._penalty()
        gradient = self._gradient(shares.sum() + penalty)
        loss = Loss(float((shares.sum() + penalty).detach()), float((shares.abs().sum() + penalty.abs()).detach()))
        return loss, gradient, running_statistics(dict(self.model.named_buffers()))

    def parts(self, state: State, window: Batch, sizes: Sequence[int], inside: Inside = WHOLE) -> Parts:
        """Split the full-batch gradient by micro-batches: one forward of the whole window, one backward each.

        With BatchNorm or a loss that couples samples the parts are the full batch's, so an accumulated gradient leaves their
        span, unless `inside` has those computed within the micro-batches. The penalty's gradient is in every part.

        Args:
            state: Parameters and buffers to start from.
            window: All of its samples.
            sizes: Samples in each micro-batch.
            inside: What is computed within the micro-batches.

        Returns:
            For each micro-batch the gradient of the mean over its own loss terms, and their number.
        """
        means, terms = self._means(state, window, sizes, inside)
        return Parts(tuple(self._keep(self._gradient(mean)) for mean in means), tuple(terms))

    def parts_by_rows(self, state: State, window: Batch, sizes: Sequence[int]) -> Iterator[tuple[slice, list[Tensor]]]:
        """The same parts for a few parameters at a time: of a large model at most two gradients lie in memory, whatever N.

        Args:
            state: Parameters and buffers to start from.
            window: All of its samples.
            sizes: Samples in each micro-batch.

        Yields:
            A slice of [P], and the elements of each micro-batch's part there.
        """
        means, _ = self._means(state, window, sizes, WHOLE)
        own, start = list(self.model.parameters()), 0
        most = max(2 * sum(p.numel() for p in own), LEAST_AT_ONCE) // len(means)
        while own:
            sums = list(accumulate(p.numel() for p in own))
            num = max(1, sum(size <= most for size in sums))
            yield slice(start, start + sums[num - 1]), [self._gradient(mean, own[:num]) for mean in means]
            own, start = own[num:], start + sums[num - 1]

    def share(self, state: State, window: Batch, sizes: Sequence[int], places: Sequence[int], inside: Inside = WHOLE) -> Tensor:
        """Compute what some micro-batches rightly contribute to the window's gradient, in one backward.

        Args:
            state: Parameters and buffers to start from.
            window: All of its samples.
            sizes: Samples in each micro-batch.
            places: Which of them.
            inside: What is computed within the micro-batches.

        Returns:
            [P] the sum of their `Parts.shares`.
        """
        means, terms = self._means(state, window, sizes, inside)
        shares = [means[k] * (terms[k] / sum(terms)) for k in places]
        return self._gradient(torch.stack(shares).sum()) if shares else flatten(map(torch.zeros_like, self.model.parameters()))

    def _means(self, state: State, window: Batch, sizes: Sequence[int], inside: Inside) -> tuple[list[Tensor], list[float]]:
        """The mean loss over each micro-batch's loss terms, with the penalty, and their numbers."""
        losses = self._losses(state, window, sizes, inside)
        terms = [n.sum().item() for n in self.workload.num_terms(window).split(list(sizes))]
        penalty = self._penalty()
        return [loss.sum() / (n or 1) + penalty for loss, n in zip(losses.split(list(sizes)), terms, strict=True)], terms

    def penalty_gradient(self, state: State) -> Tensor:
        """[P] gradient of the penalty alone."""
        restore(self.model, state)
        return self._gradient(self._penalty())

    def _losses(self, state: State, window: Batch, sizes: Sequence[int], inside: Inside) -> Tensor:
        """[n] per-sample losses; the model's buffers have moved on."""
        restore(self.model, state)
        return losses_inside(self.workload, self.model, window, sizes, inside)

    def _gradient(self, objective: Tensor, of: Iterable[nn.Parameter] | None = None) -> Tensor:
        """[P] of parameters, all by default; zeros for those frozen or not reached. The graph stays for the next part."""
        own = list(self.model.parameters() if of is None else of)
        trained = [p for p in own if p.requires_grad]
        found = iter(torch.autograd.grad(objective, trained, retain_graph=True, materialize_grads=True) if trained else ())
        return flatten(next(found) if p.requires_grad else torch.zeros_like(p) for p in own)

    def _penalty(self) -> Tensor:
        return self.workload.auxiliary(dict(self.model.named_parameters()))


def losses_inside(workload: Workload, model: nn.Module, window: Batch, sizes: Sequence[int], inside: Inside) -> Tensor:
    """Compute the losses of a window's rows, with statistics or losses computed within chunks.

    It takes one forward pass of the window; or one for each chunk in turn if statistics or draws are the chunks', so that
    everything a forward takes from its rows, or leaves to the next one, is the chunk's.

    Args:
        workload: The workload.
        model: The model.
        window: The window, of n rows.
        sizes: Rows of each chunk.
        inside: What is computed within the chunks.

    Returns:
        [n] the losses.
    """
    edges = list(accumulate(sizes, initial=0))
    chunks = [window.rows(slice(start, end)) for start, end in pairwise(edges)]
    prepared = [workload.prepared(chunk) for chunk in chunks] if inside.loss else None
    if inside.statistics or inside.draws or (inside.loss and workload.pools_rows):
        outputs = [workload.forward(model, chunk) for chunk in chunks]
        if prepared is None and workload.coupling:
            return workload.losses(pytree.joined(outputs, sizes), workload.prepared(window))
    else:
        whole = workload.forward(model, window)
        if prepared is None:
            return workload.losses(whole, workload.prepared(window))
        outputs = [pytree.rows(whole, slice(*edge), of=len(window)) for edge in pairwise(edges)]
    if prepared is None:
        all_rows = workload.prepared(window)
        prepared = [all_rows.rows(slice(*edge)) for edge in pairwise(edges)]
    return torch.cat([workload.losses(out, chunk) for out, chunk in zip(outputs, prepared, strict=True)])


def running_statistics(state: State) -> Tensor:
    """Concatenate all running means and variances of a snapshot.

    Args:
        state: The snapshot.

    Returns:
        A float64 vector; empty without BatchNorm.
    """
    values = [value for name, value in state.items() if name.endswith(("running_mean", "running_var"))]
    return flatten(values) if values else torch.zeros(0, dtype=torch.float64)
