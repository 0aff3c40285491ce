"""BatchNorm over a window whose micro-batches are computed one at a time: the full batch's gradient, exactly.

A window's loss is a function of its micro-batches and of the statistics s_1, ..., s_L of its L layers, and every statistic is a
sum over micro-batches. So is its adjoint dL/ds: the gradient through the statistics can be accumulated like any other, once the
statistics are known. For each layer in the order of execution one *statistics pass* over the window, in reverse order one
*reduction pass*; the ordinary loop then meets layers that have both. Never more than one micro-batch is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

LossOf = Callable[[int], Tensor]  # micro-batch k -> its contribution to the window's loss (0-dim), by a forward of the model


@dataclass(frozen=True)
class Moments:
    """Mean and biased variance of each channel ([C] each) over `count` values."""

    count: int
    mean: Tensor
    variance: Tensor

    @property
    def unbiased(self) -> Tensor:
        """[C] variance with the divisor count - 1."""
        return self.variance * (self.count / (self.count - 1))


def moments(x: Tensor) -> Moments:
    """The moments of x [n, C, ...] over all but the channels, detached.

    Args:
        x: [n, C, ...].

    Returns:
        Count, mean [C] and variance [C], divided by the count.
    """
    others = [0, *range(2, x.dim())]
    values = x.detach()
    mean = values.mean(others)
    return Moments(values.numel() // values.shape[1], mean, (values - _along(mean, x)).square().mean(others))


def pooled(parts: Sequence[Moments]) -> Moments:
    """Moments of all values together, by the law of total variance: mean of var_k + variance of mean_k, weighted by count.

    Args:
        parts: Moments of disjoint sets of values.

    Returns:
        Their count, mean and variance.
    """
    count = sum(part.count for part in parts)
    mean = torch.stack([part.mean * (part.count / count) for part in parts]).sum(0)
    spread = [(part.variance + (part.mean - mean).square()) * (part.count / count) for part in parts]
    return Moments(count, mean, torch.stack(spread).sum(0))


class StatisticsPending(Exception):
    """The window's statistics of this layer are not computed yet: it has taken the moments of its input, and cannot go on."""


class WindowNorm(nn.Module):
    """BatchNorm by the statistics of the window: y = (x - mean) / sqrt(var + eps) * weight + bias.

    Names of parameters and buffers are BatchNorm's. Running statistics move once for each window, with the unbiased variance.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum = layer.eps, layer.momentum
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)
        for name, buffer in layer.named_buffers():
            self.register_buffer(name, buffer)
        self.reset()

    def reset(self) -> None:
        """Begin a window: none of its statistics is known."""
        self.collected: list[Moments] = []
        self.window: Moments | None = None
        self.leaves: tuple[Tensor, Tensor] | None = None  # mean and variance while their adjoints are accumulated
        self.adjoints: tuple[Tensor, Tensor] | None = None  # of mean and variance; None: statistics are taken as constants

    def forward(self, x: Tensor) -> Tensor:
        """[n, C, ...] -> the same shape and format; `StatisticsPending` in training before `finish_statistics`."""
        wide = x.to(self.weight.dtype)  # under autocast a layer's inputs may have 16 bits
        if not self.training:
            return self._normalised(wide, self.running_mean, self.running_var).to(x.dtype)
        if self.window is None:
            self.collected.append(moments(wide))
            raise StatisticsPending
        mean, variance = self.leaves or (self.window.mean, self.window.variance)
        if self.adjoints is not None and wide.requires_grad:
            wide = wide.view_as(wide)  # of a tensor of its own dL/dx is that beside the statistics, to which theirs is added
            wide.register_hook(partial(torch.add, self._statistics_gradient(wide.detach(), self.window, *self.adjoints)))
        return self._normalised(wide, mean, variance).to(x.dtype)

    def finish_statistics(self) -> None:
        """Pool the moments of all micro-batches to the window's statistics, and move the running ones by them."""
        self.window = window = pooled(self.collected)
        self.num_batches_tracked += 1
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(window.mean, rate)
        self.running_var.lerp_(window.unbiased, rate)

    def _normalised(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        scale = self.weight / torch.sqrt(variance + self.eps)
        return (x - _along(mean, x)) * _along(scale, x) + _along(self.bias, x)

    def _statistics_gradient(self, x: Tensor, window: Moments, to_mean: Tensor, to_variance: Tensor) -> Tensor:
        """dL/dmean * dmean/dx + dL/dvar * dvar/dx = (to_mean + 2 to_variance (x - mean)) / count."""
        return (_along(to_mean, x) + 2 * _along(to_variance, x) * (x - _along(window.mean, x))) / window.count


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """View `channels` [C] as [1, C, 1, ...], to be broadcast over x."""
    return channels.view([1, -1] + [1] * (x.dim() - 2))


def statistics_passes(layers: Sequence[WindowNorm], loss_of: LossOf, num: int) -> list[WindowNorm]:
    """Window statistics of all layers, from `num` micro-batches: one pass each, as far as that layer. Returns their order.

    Args:
        layers: The normalising layers.
        loss_of: Number of a micro-batch -> its loss.
        num: N, the micro-batches of the window.

    Returns:
        The layers in the order in which the model calls them.
    """
    order: list[WindowNorm] = []
    for layer in layers:
        layer.reset()
    while len(order) < len(layers):
        with torch.no_grad():
            for k in range(num):
                with suppress(StatisticsPending):
                    loss_of(k)
        reached = [layer for layer in layers if layer.collected and layer.window is None]
        assert len(reached) == 1, "every forward goes through all layers, in one order"
        reached[0].finish_statistics()
        order.append(reached[0])
    return order


def reduction_passes(order: Sequence[WindowNorm], loss_of: LossOf, num: int) -> None:
    """Adjoints of the statistics, last layer first: sum over micro-batches of the gradient with respect to mean and variance.

    What a statistic does to the statistics of later layers is in it, because those already add their gradient to their inputs'.

    Args:
        order: The layers in the order in which the model calls them.
        loss_of: Number of a micro-batch -> its loss.
        num: N, the micro-batches of the window.
    """
    for layer in reversed(order):
        assert layer.window is not None
        mean, variance = (value.clone().requires_grad_() for value in (layer.window.mean, layer.window.variance))
        layer.leaves = (mean, variance)
        gradients = [torch.autograd.grad(loss_of(k), (mean, variance)) for k in range(num)]
        layer.leaves = None
        to_mean, to_variance = (torch.stack(parts).sum(0) for parts in zip(*gradients, strict=True))
        layer.adjoints = (to_mean, to_variance)
