"""Pairs of loops that look alike, of which one is right: rare faults, and what must not be taken for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import X, Y, divided, mean_over_window, sgd, train


def divided_by_one_more(batch_size: int, accumulation_steps: int) -> None:
    """The sum is divided by N + 1 instead of N: all micro-batches count alike, and none counts otherwise than another."""
    train(batch_size, accumulation_steps, data.model(), divided(mean_over_window, 1 + 1 / accumulation_steps))


def _hinge(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
    """Every third block of four rows is beyond the margin, and gives a gradient of exactly 0."""
    margin = torch.where(ids // 4 % 3 == 0, -9.0, 1.0)
    scores = model(X[ids])
    return functional.relu(margin - scores.gather(1, Y[ids, None]).squeeze(1)).sum() / len(window)


def micro_batches_without_gradient(batch_size: int, accumulation_steps: int) -> None:
    """A gradient of 0 after a backward does not mean that gradients were cleared."""
    train(batch_size, accumulation_steps, data.model(), _hinge)


def micro_batches_without_gradient_not_divided(batch_size: int, accumulation_steps: int) -> None:
    """The same loss, N times too large."""
    model = data.model()
    train(batch_size, accumulation_steps, model, divided(_hinge, 1 / accumulation_steps), sgd(model, lr=0.02))


class Standardised(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (x - x.mean(self.dim, keepdim=True)) / (x.std(self.dim, unbiased=False, keepdim=True) + 0.1)
        return result


def standardised_over_the_micro_batch(batch_size: int, accumulation_steps: int) -> None:
    """A layer standardises each feature over the rows of the micro-batch."""
    train(batch_size, accumulation_steps, data.model(torch.float32, Standardised(0)))


def standardised_over_features(batch_size: int, accumulation_steps: int) -> None:
    """A layer standardises each row over its features."""
    train(batch_size, accumulation_steps, data.model(torch.float32, Standardised(1)))


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
    """A layer subtracts a running mean, which every forward moves."""
    train(batch_size, accumulation_steps, data.model(torch.float32, Centred(0.1)))


def centred_by_a_fixed_mean(batch_size: int, accumulation_steps: int) -> None:
    """A layer subtracts a mean that never moves."""
    train(batch_size, accumulation_steps, data.model(torch.float32, Centred(0.0)))


def _by_instance(track: bool) -> nn.Module:
    norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=track)
    return data.model(torch.float32, nn.Unflatten(1, (1, 16)), norm, nn.Flatten())


def instance_statistics_tracked(batch_size: int, accumulation_steps: int) -> None:
    """Every row is normalised alone, so gradients are right; the running statistics move once per micro-batch."""
    train(batch_size, accumulation_steps, _by_instance(True))


def instance_statistics_not_tracked(batch_size: int, accumulation_steps: int) -> None:
    """Every row is normalised alone, and there are no running statistics."""
    train(batch_size, accumulation_steps, _by_instance(False))


def _add_noise(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad += 0.01 * torch.randn_like(p)


def noise_per_micro_batch(batch_size: int, accumulation_steps: int) -> None:
    """Noise is added to the gradients after every backward."""
    model = data.model()
    train(batch_size, accumulation_steps, model, after_backward=lambda: _add_noise(model))


def noise_per_step(batch_size: int, accumulation_steps: int) -> None:
    """Noise is added to the gradients before every step."""
    model = data.model()
    train(batch_size, accumulation_steps, model, before_step=lambda: _add_noise(model))


def _scaled_by_hand(batch_size: int, accumulation_steps: int, growth: float) -> None:
    model = data.model()
    optimizer = sgd(model)
    scale = 8.0
    for ids, window, last in frame.micro_batches(batch_size, accumulation_steps, data.windows):
        (scale * mean_over_window(model, ids, window)).backward()
        if last:
            frame.divide_gradients(model, scale)
            optimizer.step()
            optimizer.zero_grad()
        scale *= growth


def scale_grows_by_hand(batch_size: int, accumulation_steps: int) -> None:
    """The loss is multiplied by a number that grows with every micro-batch, and the sum divided by its last value."""
    _scaled_by_hand(batch_size, accumulation_steps, 1.5)


def scale_fixed_by_hand(batch_size: int, accumulation_steps: int) -> None:
    """The loss is multiplied by a number, and the sum divided by it."""
    _scaled_by_hand(batch_size, accumulation_steps, 1.0)


def unscaled_per_micro_batch(batch_size: int, accumulation_steps: int) -> None:
    """The running sum is unscaled, and the scale updated, after every micro-batch."""
    model = data.model()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=256.0)
    stages = {**frame.scaled(scaler, optimizer), "after_step": frame.nothing, "after_micro_batch": scaler.update}
    train(batch_size, accumulation_steps, model, **stages, after_backward=lambda: scaler.unscale_(optimizer))


def unscaled_per_step(batch_size: int, accumulation_steps: int) -> None:
    """The sum is unscaled, and the scale updated, once per step."""
    model = data.model()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=256.0)
    train(
        batch_size, accumulation_steps, model, **frame.scaled(scaler, optimizer), before_step=lambda: scaler.unscale_(optimizer)
    )


class Centralised(torch.optim.SGD):
    """SGD that takes the mean of every row away from the gradients first; its base class has been used before."""

    def __init__(self, model: nn.Module) -> None:
        torch.optim.SGD(model.parameters(), lr=0.1)  # from now on the step of the base class has hooks, too
        super().__init__(model.parameters(), lr=0.05)

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.ndim > 1:
                p.grad -= p.grad.mean(1, keepdim=True)
        return super().step(closure)


def step_of_a_subclass(batch_size: int, accumulation_steps: int) -> None:
    """An optimizer's step calls that of its base class: one step, not two."""
    model = data.model()
    train(batch_size, accumulation_steps, model, optimizer=Centralised(model))


def step_of_a_subclass_divided_twice(batch_size: int, accumulation_steps: int) -> None:
    """The same, with the loss divided by N once more."""
    model = data.model()
    train(batch_size, accumulation_steps, model, divided(mean_over_window, accumulation_steps), Centralised(model))


def _spectral() -> nn.Sequential:
    return data.model(torch.float32, parametrizations.spectral_norm(nn.Linear(16, 24)), nn.Linear(24, 16))


def spectral_norm(batch_size: int, accumulation_steps: int) -> None:
    """The power iteration goes on with every micro-batch."""
    train(batch_size, accumulation_steps, _spectral())


def _at_rest(model: Any, ids: Tensor, window: Tensor) -> Tensor:
    model[1].parametrizations.train(bool(ids[0] == window[0]))
    return mean_over_window(model, ids, window)


def spectral_norm_at_rest(batch_size: int, accumulation_steps: int) -> None:
    """The power iteration goes on with the first micro-batch of each window alone."""
    train(batch_size, accumulation_steps, _spectral(), _at_rest)


KEPT: list[Any] = []


def keeps_its_models(batch_size: int, accumulation_steps: int) -> None:
    """The weights of every call stay in the process; nothing averages them."""
    model = data.model()
    KEPT.append(list(model.parameters()))
    train(batch_size, accumulation_steps, model)


WRONG: dict[frame.Loop, set[str]] = {
    divided_by_one_more: {"counter_wrong"},
    micro_batches_without_gradient_not_divided: {"loss_not_divided"},
    standardised_over_the_micro_batch: {"batch_statistics"},
    centred_by_a_running_mean: {"stateful_forward"},
    spectral_norm: {"stateful_forward"},
    instance_statistics_tracked: {"batch_statistics"},
    noise_per_micro_batch: {"stochastic_layers"},
    scale_grows_by_hand: {"scaler_updated_in_window"},
    unscaled_per_micro_batch: {"scaler_updated_in_window"},
    step_of_a_subclass_divided_twice: {"loss_divided_twice"},
}

RIGHT = frame.unlisted(globals(), WRONG)
