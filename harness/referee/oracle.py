"""The float64 referee: gradients by a path that shares nothing with the loop under test.

One functional forward over the whole window, per-sample losses, explicit weights and `torch.autograd.grad`: no `.grad`
accumulation, no optimizer, no autocast, no module state.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from harness.referee.gradients import flatten
from harness.workloads import Batch, Workload
from harness.workloads.layers import replace_layers

State = dict[str, Tensor]  # parameters and buffers by name, floating ones in float64


def snapshot(model: nn.Module) -> State:
    """Float64 copies of the model's parameters and buffers; the model is left alone."""
    return {name: value.detach().to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)
            for name, value in model.state_dict(keep_vars=True).items()}  # fmt: skip


def clipped(gradient: Tensor, max_norm: float | None) -> Tensor:
    """g * min(1, max_norm / (||g|| + 1e-6)), PyTorch's rule for clipping by norm."""
    if max_norm is None:
        return gradient
    return gradient * torch.clamp(max_norm / (torch.linalg.vector_norm(gradient) + 1e-6), max=1.0)


def no_clipping(max_norm: float | None) -> float | None:
    """The threshold that switches clipping off: infinite where one is configured, for a loop may rely on there being one."""
    return None if max_norm is None else math.inf


@dataclass(frozen=True)
class Parts:
    """The full-batch gradient taken apart by micro-batches: gradient = sum_k terms[k] / sum(terms) * parts[k]."""

    parts: tuple[Tensor, ...]  # [P] each: gradient of micro-batch k's mean loss, with the full batch's forward
    terms: tuple[int, ...]

    @property
    def shares(self) -> list[Tensor]:
        """[P] each: what a micro-batch rightly contributes, terms[k] / sum(terms) * parts[k]."""
        total = sum(self.terms)
        return [part * (n / total) for part, n in zip(self.parts, self.terms, strict=True)]

    @property
    def gradient(self) -> Tensor:
        """[P] the full batch's gradient."""
        return torch.stack(self.shares).sum(0)


@dataclass(frozen=True)
class Loss:
    """A window's objective."""

    value: float
    magnitude: float  # the same of the terms' absolute values: what rounding is relative to where they cancel

    def error(self, reported: float) -> float:
        """|reported - value| / magnitude; 0 where both are zero."""
        return 0.0 if reported == self.value else abs(reported - self.value) / self.magnitude if self.magnitude else math.inf


@dataclass(frozen=True)
class Inside:
    """What is computed within each micro-batch although the full batch computes it over the window."""

    statistics: bool = False  # of BatchNorm
    loss: bool = False  # of a loss whose terms depend on other samples


WHOLE = Inside()


class Referee:
    """Exact gradients of the window's mean loss at any parameters, in float64."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        """`workload` and `model` in float64; the model gives the architecture only, its values are never used."""
        self.workload = workload
        self.model = model.train()
        self.names = [name for name, _ in model.named_parameters()]

    def gradient(self, state: State, window: Batch) -> Tensor:
        """[P] gradient of the objective over the whole window, in one forward."""
        return self.loss_and_gradient(state, window)[1]

    def loss_and_gradient(self, state: State, window: Batch) -> tuple[Loss, Tensor]:
        """The window's objective sum_i l_i / sum_i n_i + penalty, and its gradient [P]."""
        return self._whole(self.model, state, window, None)[:2]

    def within(self, state: State, window: Batch, sizes: Sequence[int], inside: Inside) -> tuple[Loss, Tensor, State]:
        """`loss_and_gradient` with what `inside` says computed within chunks of `sizes`, and the state after it.

        Hoffer et al. 2017 for BatchNorm: chunk k is normalised by its own statistics and moves the running statistics in turn.
        Accumulation over micro-batches of the same sizes is this computation exactly.
        """
        model = ghost_model(self.model, sizes) if inside.statistics else self.model
        return self._whole(model, state, window, sizes if inside.loss else None)

    def parts(self, state: State, window: Batch, sizes: Sequence[int], inside: Inside = WHOLE) -> Parts:
        """The full-batch gradient by micro-batches of `sizes`: one forward of the whole window, one backward each.

        With BatchNorm or a loss that couples samples the parts are the full batch's, so an accumulated gradient leaves their
        span, unless `inside` has those computed within the micro-batches. The penalty's gradient is in every part.
        """
        model = ghost_model(self.model, sizes) if inside.statistics else self.model
        losses, own, parameters = self._losses(model, state, window, sizes if inside.loss else None)
        terms = [int(n.sum()) for n in self.workload.num_terms(window).split(list(sizes))]
        penalty = self._penalty(own)
        means = [loss.sum() / max(n, 1) + penalty for loss, n in zip(losses.split(list(sizes)), terms, strict=True)]
        grads = (torch.autograd.grad(mean, parameters, retain_graph=True, materialize_grads=True) for mean in means)
        return Parts(tuple(flatten(grad) for grad in grads), tuple(terms))

    def penalty_gradient(self, state: State) -> Tensor:
        """[P] gradient of the penalty alone."""
        own, parameters = self._leaves(state)
        return flatten(torch.autograd.grad(self._penalty(own), parameters, materialize_grads=True))

    def _whole(self, model: nn.Module, state: State, window: Batch, sizes: Sequence[int] | None) -> tuple[Loss, Tensor, State]:
        losses, own, parameters = self._losses(model, state, window, sizes)
        shares, penalty = losses / self.workload.num_terms(window).sum(), self._penalty(own)
        objective = shares.sum() + penalty
        gradient = flatten(torch.autograd.grad(objective, parameters, materialize_grads=True))
        return Loss(float(objective.detach()), float((shares.abs().sum() + penalty.abs()).detach())), gradient, own

    def _losses(
        self, model: nn.Module, state: State, window: Batch, sizes: Sequence[int] | None
    ) -> tuple[Tensor, State, list[Tensor]]:
        """[n] per-sample losses, the state with its buffers moved on, and its leaf parameters.

        One forward of the whole window; with `sizes` the samples whose losses see each other are those of a chunk.
        """
        own, parameters = self._leaves(state)
        outputs = functional_call(model, own, (window.inputs,))
        edges = list(accumulate([len(window)] if sizes is None else sizes, initial=0))
        chunks = [slice(start, end) for start, end in pairwise(edges)]
        losses = [self.workload.losses(outputs[chunk], self.workload.prepared(window.rows(chunk))) for chunk in chunks]
        return torch.cat(losses), own, parameters

    def _leaves(self, state: State) -> tuple[State, list[Tensor]]:
        own = {name: value.clone() for name, value in state.items()}  # a training forward writes to the buffers
        return own, [own[name].requires_grad_() for name in self.names]

    def _penalty(self, own: State) -> Tensor:
        return self.workload.auxiliary({name: own[name] for name in self.names})


def running_statistics(state: State) -> Tensor:
    """All running means and variances as one vector (empty without BatchNorm)."""
    values = [value for name, value in state.items() if name.endswith(("running_mean", "running_var"))]
    return flatten(values) if values else torch.zeros(0, dtype=torch.float64)


class GhostBatchNorm(nn.Module):
    """BatchNorm over virtual batches, from its definition: y = (x - mean_k) / sqrt(var_k + eps) * weight + bias.

    Written out rather than called from `torch.nn.functional`, so that it is independent of the layer it referees.
    Running statistics move once for each chunk, in order: r <- (1 - m) r + m s_k, with the unbiased variance.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, layer: _BatchNorm, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes, self.eps, self.momentum = list(sizes), layer.eps, layer.momentum
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)
        for name, buffer in layer.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        """[n, C, ...] -> the same shape; the n samples are cut into chunks of `sizes`."""
        shape = [1, -1] + [1] * (x.dim() - 2)
        others = [0, *range(2, x.dim())]
        outputs = []
        for chunk in x.split(self.sizes):
            mean = chunk.mean(others)
            centred = chunk - mean.view(shape)
            variance = (centred * centred).mean(others)
            outputs.append(centred / torch.sqrt(variance + self.eps).view(shape))
            self._move(mean.detach(), variance.detach(), chunk.numel() // chunk.shape[1])
        return torch.cat(outputs) * self.weight.view(shape) + self.bias.view(shape)

    def _move(self, mean: Tensor, variance: Tensor, count: int) -> None:
        self.num_batches_tracked += 1
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.mul_(1 - rate).add_(rate * mean)
        self.running_var.mul_(1 - rate).add_(rate * variance * count / (count - 1))


def ghost_model(model: nn.Module, sizes: Sequence[int]) -> nn.Module:
    """A copy of `model` whose BatchNorm layers are `GhostBatchNorm`; names of parameters and buffers stay the same."""
    ghost = copy.deepcopy(model)
    replace_layers(ghost, _BatchNorm, lambda layer: GhostBatchNorm(layer, sizes))
    return ghost
