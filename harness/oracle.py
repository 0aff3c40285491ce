"""The float64 referee: gradients by a path that shares nothing with the loop under test.

One functional forward over the whole window, per-sample losses, explicit weights and `torch.autograd.grad`: no `.grad`
accumulation, no optimizer, no autocast, no module state.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from harness.gradients import flatten
from harness.workloads import Batch, Workload

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
        return torch.stack(self.shares).sum(0)


class Referee:
    """Exact gradients of the window's mean loss at any parameters, in float64."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        """`workload` and `model` in float64; the model gives the architecture only, its values are never used."""
        self.workload = workload
        self.model = model.train()
        self.names = [name for name, _ in model.named_parameters()]

    def gradient(self, state: State, window: Batch) -> Tensor:
        """[P] gradient of sum_i l_i / sum_i n_i over the whole window, in one forward."""
        return self.loss_and_gradient(state, window)[1]

    def loss_and_gradient(self, state: State, window: Batch) -> tuple[float, Tensor]:
        """The window's mean loss, and its gradient [P]."""
        losses, parameters, _ = self._losses(self.model, state, window)
        mean = (losses / self.workload.num_terms(window).sum()).sum()
        return float(mean.detach()), flatten(torch.autograd.grad(mean, parameters, materialize_grads=True))

    def parts(self, state: State, window: Batch, sizes: Sequence[int], *, ghost: bool = False) -> Parts:
        """The full-batch gradient by micro-batches of `sizes`: one forward of the whole window, one backward each.

        With BatchNorm the parts keep the full batch's statistics, so an accumulated gradient leaves their span, unless `ghost`:
        then each micro-batch is normalised by its own.
        """
        model = ghost_model(self.model, sizes) if ghost else self.model
        losses, parameters, _ = self._losses(model, state, window)
        terms = [int(n.sum()) for n in self.workload.num_terms(window).split(list(sizes))]
        means = [loss.sum() / max(n, 1) for loss, n in zip(losses.split(list(sizes)), terms, strict=True)]
        grads = (torch.autograd.grad(mean, parameters, retain_graph=True, materialize_grads=True) for mean in means)
        return Parts(tuple(flatten(grad) for grad in grads), tuple(terms))

    def ghost(self, state: State, window: Batch, sizes: Sequence[int]) -> tuple[float, Tensor, State]:
        """Loss and gradient of the *full batch* under Ghost BatchNorm with virtual batches of `sizes`, and the state after it.

        Hoffer et al. 2017: chunk k is normalised by its own statistics and moves the running statistics in turn.
        Accumulation over micro-batches of the same sizes is this computation exactly.
        """
        losses, parameters, after = self._losses(ghost_model(self.model, sizes), state, window)
        mean = (losses / self.workload.num_terms(window).sum()).sum()
        return float(mean.detach()), flatten(torch.autograd.grad(mean, parameters, materialize_grads=True)), after

    def _losses(self, model: nn.Module, state: State, window: Batch) -> tuple[Tensor, list[Tensor], State]:
        """[n] per-sample losses, the leaf parameters they hang on, and the state with its buffers moved on."""
        own = {name: value.clone() for name, value in state.items()}  # a training forward writes to the buffers
        parameters = [own[name].requires_grad_() for name in self.names]
        outputs = functional_call(model, own, (window.inputs,))
        return self.workload.losses(outputs, window), parameters, own


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
    for name, layer in list(ghost.named_modules()):
        if isinstance(layer, _BatchNorm):
            parent, _, child = name.rpartition(".")
            setattr(ghost.get_submodule(parent), child, GhostBatchNorm(layer, sizes))
    return ghost
