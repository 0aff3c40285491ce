"""Pairs of loops that look alike, of which one is right: rare faults, and what must not be taken for them."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import X, Y, divided, loop, mean_over_window, sgd


@loop("counter_wrong")
def divided_by_one_more(at):
    """The sum is divided by N + 1 instead of N: all micro-batches count alike, and none counts otherwise than another."""
    return {"loss": divided(mean_over_window, 1 + 1 / at.n)}


def _hinge(model, ids, window):
    """Every third block of four rows is beyond the margin, and gives a gradient of exactly 0."""
    margin = torch.where(ids // 4 % 3 == 0, -9.0, 1.0)
    scores = model(X[ids])
    return functional.relu(margin - scores.gather(1, Y[ids, None]).squeeze(1)).sum() / len(window)


@loop()
def micro_batches_without_gradient(at):
    """A gradient of 0 after a backward does not mean that gradients were cleared."""
    return {"loss": _hinge}


@loop("loss_not_divided", optimizer=partial(sgd, lr=0.02))
def micro_batches_without_gradient_not_divided(at):
    """The same loss, N times too large."""
    return {"loss": divided(_hinge, 1 / at.n)}


class Standardised(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return (x - x.mean(self.dim, keepdim=True)) / (x.std(self.dim, unbiased=False, keepdim=True) + 0.1)


def _with(*layers):
    return data.model(torch.float32, *layers)


@loop("batch_statistics", model=lambda: _with(Standardised(0)))
def standardised_over_the_micro_batch(at):
    """A layer standardises each feature over the rows of the micro-batch."""
    return {}


@loop(model=lambda: _with(Standardised(1)))
def standardised_over_features(at):
    """A layer standardises each row over its features."""
    return {}


class Centred(nn.Module):
    mean: Tensor

    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.register_buffer("mean", torch.full((16,), 0.3))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), self.rate)
        return x - self.mean


@loop("stateful_forward", model=lambda: _with(Centred(0.1)))
def centred_by_a_running_mean(at):
    """A layer subtracts a running mean, which every forward moves."""
    return {}


@loop(model=lambda: _with(Centred(0.0)))
def centred_by_a_fixed_mean(at):
    """A layer subtracts a mean that never moves."""
    return {}


def _by_instance(track):
    return _with(nn.Unflatten(1, (1, 16)), nn.InstanceNorm1d(1, affine=True, track_running_stats=track), nn.Flatten())


@loop("batch_statistics", model=partial(_by_instance, True))
def instance_statistics_tracked(at):
    """Every row is normalised alone, so gradients are right; the running statistics move once per micro-batch."""
    return {}


@loop(model=partial(_by_instance, False))
def instance_statistics_not_tracked(at):
    """Every row is normalised alone, and there are no running statistics."""
    return {}


def _add_noise(model):
    for p in model.parameters():
        p.grad += 0.01 * torch.randn_like(p)


@loop("stochastic_layers")
def noise_per_micro_batch(at):
    """Noise is added to the gradients after every backward."""
    return {"after_backward": lambda: _add_noise(at.model)}


@loop()
def noise_per_step(at):
    """Noise is added to the gradients before every step."""
    return {"before_step": lambda: _add_noise(at.model)}


def _scaled_by_hand(at, growth):
    scale = 8.0
    for ids, window, last in frame.micro_batches(at.size, at.n, data.windows):
        (scale * mean_over_window(at.model, ids, window)).backward()
        if last:
            frame.divide_gradients(at.model, scale)
            at.step()
        scale *= growth


@loop("scaler_updated_in_window")
def scale_grows_by_hand(at):
    """The loss is multiplied by a number that grows with every micro-batch, and the sum divided by its last value."""
    _scaled_by_hand(at, 1.5)


@loop()
def scale_fixed_by_hand(at):
    """The loss is multiplied by a number, and the sum divided by it."""
    _scaled_by_hand(at, 1.0)


@loop("scaler_updated_in_window")
def unscaled_per_micro_batch(at):
    """The running sum is unscaled, and the scale updated, after every micro-batch."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    stages = {**frame.scaled(scaler, at.optimizer), "after_step": frame.nothing, "after_micro_batch": scaler.update}
    return {**stages, "after_backward": lambda: scaler.unscale_(at.optimizer)}


@loop()
def unscaled_per_step(at):
    """The sum is unscaled, and the scale updated, once per step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    return {**frame.scaled(scaler, at.optimizer), "before_step": lambda: scaler.unscale_(at.optimizer)}


class Centralised(torch.optim.SGD):
    """SGD that takes the mean of every row away from the gradients first; its base class has been used before."""

    def __init__(self, model):
        torch.optim.SGD(model.parameters(), lr=0.1)  # from now on the step of the base class has hooks, too
        super().__init__(model.parameters(), lr=0.05)

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.ndim > 1:
                p.grad -= p.grad.mean(1, keepdim=True)
        return super().step(closure)


@loop(optimizer=Centralised)
def step_of_a_subclass(at):
    """An optimizer's step calls that of its base class: one step, not two."""
    return {}


@loop("loss_divided_twice", optimizer=Centralised)
def step_of_a_subclass_divided_twice(at):
    """The same, with the loss divided by N once more."""
    return {"loss": divided(mean_over_window, at.n)}


def _spectral():
    return _with(parametrizations.spectral_norm(nn.Linear(16, 24)), nn.Linear(24, 16))


@loop("stateful_forward", model=_spectral)
def spectral_norm(at):
    """The power iteration goes on with every micro-batch."""
    return {}


def _at_rest(model, ids, window):
    model[1].parametrizations.train(bool(ids[0] == window[0]))
    return mean_over_window(model, ids, window)


@loop(model=_spectral)
def spectral_norm_at_rest(at):
    """The power iteration goes on with the first micro-batch of each window alone."""
    return {"loss": _at_rest}


KEPT = []


@loop()
def keeps_its_models(at):
    """The weights of every call stay in the process; nothing averages them."""
    KEPT.append(list(at.model.parameters()))
    return {}


RIGHT, WRONG = frame.tables(globals())
