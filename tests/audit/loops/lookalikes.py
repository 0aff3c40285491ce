"""Pairs of hand-written loops that look alike, of which one is right: rare faults, and what must not be taken for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.trainers import data

ce = functional.cross_entropy
Loss = Callable[[nn.Module, Tensor], Tensor]  # (model, row numbers) -> summed loss


def _micro_batches(batch_size: int, accumulation_steps: int) -> Iterator[tuple[Tensor, int, bool]]:
    """(row numbers, rows of the window, whether it is the window's last)"""
    for window in data.windows(batch_size * accumulation_steps):
        parts = window.split(batch_size)
        for i, ids in enumerate(parts):
            yield ids, len(window), i + 1 == len(parts)


def _train(batch_size: int, accumulation_steps: int, model: nn.Module, loss: Loss, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for ids, num_rows, last in _micro_batches(batch_size, accumulation_steps):
        (loss(model, ids) / num_rows).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def _classify(model: nn.Module, ids: Tensor) -> Tensor:
    x, y = data.images()
    return ce(model(x[ids]), y[ids], reduction="sum")


# -- a multiple of the right gradient --------------------------------------------------------------------------------


def divided_by_one_more(batch_size: int, accumulation_steps: int) -> None:
    """By N + 1: all micro-batches count alike, and none counts otherwise than another."""
    _train(batch_size, accumulation_steps, data.model(), lambda m, ids: _classify(m, ids) / (1 + 1 / accumulation_steps))


# -- nothing to clear -------------------------------------------------------------------------------------------------


def _hinge(model: nn.Module, ids: Tensor) -> Tensor:
    """Every third block of four rows is beyond the margin, and gives a gradient of exactly 0."""
    x, y = data.images()
    margin = torch.where(ids // 4 % 3 == 0, -9.0, 1.0)
    scores = model(x[ids])
    return functional.relu(margin - scores.gather(1, y[ids, None]).squeeze(1)).sum()


def micro_batches_without_gradient(batch_size: int, accumulation_steps: int) -> None:
    _train(batch_size, accumulation_steps, data.model(), _hinge)


def micro_batches_without_gradient_not_divided(batch_size: int, accumulation_steps: int) -> None:
    _train(batch_size, accumulation_steps, data.model(), lambda m, ids: accumulation_steps * _hinge(m, ids), lr=0.02)


# -- statistics by hand -----------------------------------------------------------------------------------------------


class Standardised(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (x - x.mean(self.dim, keepdim=True)) / (x.std(self.dim, unbiased=False, keepdim=True) + 0.1)
        return result


def standardised_over_the_micro_batch(batch_size: int, accumulation_steps: int) -> None:
    _train(batch_size, accumulation_steps, data.model(torch.float32, Standardised(0)), _classify)


def standardised_over_features(batch_size: int, accumulation_steps: int) -> None:
    _train(batch_size, accumulation_steps, data.model(torch.float32, Standardised(1)), _classify)


class Centred(nn.Module):
    mean: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("mean", torch.full((16,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), self.rate)
        return x - self.mean


def centred_by_a_running_mean(batch_size: int, accumulation_steps: int) -> None:
    _train(batch_size, accumulation_steps, data.model(torch.float32, Centred(0.1)), _classify)


def centred_by_a_fixed_mean(batch_size: int, accumulation_steps: int) -> None:
    _train(batch_size, accumulation_steps, data.model(torch.float32, Centred(0.0)), _classify)


def _by_instance(track: bool) -> nn.Module:
    norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=track)
    return data.model(torch.float32, nn.Unflatten(1, (1, 16)), norm, nn.Flatten())


def instance_statistics_tracked(batch_size: int, accumulation_steps: int) -> None:
    """Every row is normalised alone, so gradients are right; the running statistics move once per micro-batch."""
    _train(batch_size, accumulation_steps, _by_instance(True), _classify)


def instance_statistics_not_tracked(batch_size: int, accumulation_steps: int) -> None:
    _train(batch_size, accumulation_steps, _by_instance(False), _classify)


# -- gradients changed after the backward -----------------------------------------------------------------------------


def _noisy(batch_size: int, accumulation_steps: int, each: bool) -> None:
    torch.manual_seed(5)
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, num_rows, last in _micro_batches(batch_size, accumulation_steps):
        (_classify(model, ids) / num_rows).backward()
        for p in model.parameters() if each or last else ():
            assert p.grad is not None
            p.grad += 0.01 * torch.randn_like(p)
        if last:
            optimizer.step()
            optimizer.zero_grad()


def noise_per_micro_batch(batch_size: int, accumulation_steps: int) -> None:
    _noisy(batch_size, accumulation_steps, each=True)


def noise_per_step(batch_size: int, accumulation_steps: int) -> None:
    _noisy(batch_size, accumulation_steps, each=False)


def _scaled_by_hand(batch_size: int, accumulation_steps: int, growth: float) -> None:
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = 8.0
    for ids, num_rows, last in _micro_batches(batch_size, accumulation_steps):
        (scale * _classify(model, ids) / num_rows).backward()
        if last:
            for p in model.parameters():
                assert p.grad is not None
                p.grad /= scale
            optimizer.step()
            optimizer.zero_grad()
        scale *= growth


def scale_grows_by_hand(batch_size: int, accumulation_steps: int) -> None:
    _scaled_by_hand(batch_size, accumulation_steps, 1.5)


def scale_fixed_by_hand(batch_size: int, accumulation_steps: int) -> None:
    _scaled_by_hand(batch_size, accumulation_steps, 1.0)


def _unscaled(batch_size: int, accumulation_steps: int, each: bool) -> None:
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for ids, num_rows, last in _micro_batches(batch_size, accumulation_steps):
        scaler.scale(_classify(model, ids) / num_rows).backward()
        if each or last:
            scaler.unscale_(optimizer)
        if last:
            scaler.step(optimizer)
            optimizer.zero_grad()
        if each or last:
            scaler.update()


def unscaled_per_micro_batch(batch_size: int, accumulation_steps: int) -> None:
    _unscaled(batch_size, accumulation_steps, each=True)


def unscaled_per_step(batch_size: int, accumulation_steps: int) -> None:
    _unscaled(batch_size, accumulation_steps, each=False)


# -- a step within a step ---------------------------------------------------------------------------------------------


class Centralised(torch.optim.SGD):
    """Takes the mean of every row away from the gradients, then does what its base class does."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.ndim > 1:
                p.grad -= p.grad.mean(1, keepdim=True)
        return super().step(closure)


def _centralised(batch_size: int, accumulation_steps: int, factor: float) -> None:
    model = data.model()
    torch.optim.SGD(model.parameters(), lr=0.1)  # the base class has been used before: its own step has hooks, too
    optimizer = Centralised(model.parameters(), lr=0.05)
    for ids, num_rows, last in _micro_batches(batch_size, accumulation_steps):
        (factor * _classify(model, ids) / num_rows).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def step_of_a_subclass(batch_size: int, accumulation_steps: int) -> None:
    _centralised(batch_size, accumulation_steps, 1.0)


def step_of_a_subclass_divided_twice(batch_size: int, accumulation_steps: int) -> None:
    _centralised(batch_size, accumulation_steps, 1 / accumulation_steps)


# -- what stays behind ------------------------------------------------------------------------------------------------

KEPT: list[Any] = []


def keeps_its_models(batch_size: int, accumulation_steps: int) -> None:
    """The weights of every call stay in the process; nothing averages them."""
    model = data.model()
    KEPT.append(list(model.parameters()))
    _train(batch_size, accumulation_steps, model, _classify)


RIGHT = (
    micro_batches_without_gradient,
    standardised_over_features,
    centred_by_a_fixed_mean,
    instance_statistics_not_tracked,
    noise_per_step,
    scale_fixed_by_hand,
    unscaled_per_step,
    step_of_a_subclass,
    keeps_its_models,
)
WRONG: dict[Callable[..., Any], set[str]] = {
    divided_by_one_more: {"unexplained"},
    micro_batches_without_gradient_not_divided: {"loss_not_divided"},
    standardised_over_the_micro_batch: {"batch_statistics"},
    centred_by_a_running_mean: {"batch_statistics"},
    instance_statistics_tracked: {"batch_statistics"},
    noise_per_micro_batch: {"stochastic_layers"},
    scale_grows_by_hand: {"scaler_updated_in_window"},
    unscaled_per_micro_batch: {"scaler_updated_in_window"},
    step_of_a_subclass_divided_twice: {"loss_divided_twice"},
}
