"""Loops that were known to be judged wrongly, one example of each kind; what is right stands in the golden table."""

from functools import partial

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from accumulation_harness.audit import audit
from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import X, Y, ce, divided, full_windows, own_mean


def in_groups(model):
    """A parameter group for each tensor."""
    return torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)


loop = partial(frame.loop, optimizer=in_groups)


def by_n(at, **exchanged):
    return {"loss": divided(own_mean, at.n), "windows": full_windows, **exchanged}


@loop()
def clipped_by_total_norm(at):
    """Not divided, and every step is clipped to the same length, as torchtitan clips."""
    own = list(at.model.parameters())
    clip = lambda: clip_grads_with_norm_(own, 0.1, get_total_norm([p.grad for p in own]))  # noqa: E731
    return {"loss": own_mean, "windows": full_windows, "before_step": clip}


@loop()
def schedule_by_micro_batch(at):
    """It moves the rate after the end of this run alone."""
    return by_n(at, after_backward=torch.optim.lr_scheduler.StepLR(at.optimizer, 100).step)


class Autoencoder(nn.Module):
    """A variational one, which draws its code in its forward: 12 numbers in a micro-batch of 4 rows, 48 in 16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode = nn.Linear(12, 6), nn.Linear(3, 12)

    def forward(self, x):
        mu, logvar = self.encode(x).chunk(2, -1)
        out = self.decode(mu + (logvar / 2).exp() * torch.randn_like(mu))
        return out


@loop(model=Autoencoder)
def autoencoder_undivided(at):
    return {"loss": lambda model, ids, _: (model(X[ids]) - X[ids]).square().mean(), "windows": full_windows}


@loop()
def divided_by_rows(at):
    """Where there are as many rows as micro-batches, that is the right number."""
    return {"loss": divided(own_mean, at.size if at.n > 1 else 1), "windows": full_windows}


@loop()
def divided_by_own_rows(at):
    """`/ len(ids)` in place of `/ N`."""
    return {"loss": lambda model, ids, window: own_mean(model, ids, window) / len(ids), "windows": full_windows}


@loop()
def rates_by_layer(at):
    """LARS by hand."""

    def rate():
        for group in at.optimizer.param_groups:
            (p,) = group["params"]
            group["lr"] = float(0.05 * p.norm() / p.grad.norm())

    return by_n(at, before_step=rate)


class Spectral(nn.Module):
    """A filter with complex weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.head = nn.Parameter(torch.randn(7, dtype=torch.complex64)), nn.Linear(12, 4)

    def forward(self, x):
        out = self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=12))
        return out


@loop(model=Spectral)
def complex_weights(at):
    return by_n(at)


class Scaled(nn.Module):
    """Logits times a temperature of 1e-5 of the gradient, a prior that training alone moves, and an entropy for a log."""

    def __init__(self, remembers):
        super().__init__()
        self.net, self.scale, self.remembers = data.model(), nn.Parameter(torch.tensor(1.0)), remembers
        self.prior, self.entropy = torch.full((4,), 0.25), torch.zeros(())

    def forward(self, x):
        out = self.net(x) * (1 + 1e-5 * self.scale)
        p = out.detach().softmax(-1).mean(0)
        self.entropy = -(p * p.log()).sum()
        if self.remembers:
            self.prior = 0.9 * self.prior + 0.1 * p
        return out


@loop(model=partial(Scaled, False))
def temperature(at):
    """The temperature alone is clamped after every backward."""
    return by_n(at, after_backward=lambda: at.model.scale.grad.clamp_(-1e-7, 1e-7))


@loop(model=partial(Scaled, False))
def logged_entropy(at):
    """The model keeps the entropy of its last forward, which nothing reads."""
    return by_n(at)


@loop(model=partial(Scaled, True))
def prior_by_forward(at):
    return by_n(at)


def _average(model):
    """An average of the weights that begins at zeros."""
    kept = [torch.zeros_like(p) for p in model.parameters()]
    return lambda: [old.lerp_(p.detach(), 0.1) for old, p in zip(kept, model.parameters(), strict=True)]


@loop()
def average_from_zero(at):
    """It moves after every micro-batch."""
    return by_n(at, after_backward=_average(at.model))


@loop()
def average_by_step(at):
    return by_n(at, after_step=_average(at.model))


def _with_spare():
    return nn.ModuleDict({"net": data.model(), "spare": nn.ParameterList([nn.Parameter(torch.ones(4))])})


@loop(model=_with_spare)
def unused_weights(at):
    """Weights that no row uses shrink N times after each step."""
    loss = lambda model, ids, _: ce(model["net"](X[ids]), Y[ids]) / at.n  # noqa: E731
    return {"loss": loss, "windows": full_windows, "after_step": lambda: at.model["spare"][0].data.mul_(0.99**at.n)}


def audited(train, **options):
    return partial(audit, train, batch_size=16, accumulation_steps=(4,), **options)


AUDITED = {
    "A1 clipped by total norm": audited(clipped_by_total_norm),
    "A2 schedule by micro-batch": audited(schedule_by_micro_batch),
    "A10 autoencoder undivided": audited(autoencoder_undivided, allow=("stochastic_layers",)),
    "A11 divided by rows": audited(divided_by_rows),
    "A12 rates by layer": audited(rates_by_layer),
    "A13 complex weights": audited(complex_weights),
    "A15 entropy for a log": audited(logged_entropy),
    "A18 divided by own rows": audited(divided_by_own_rows),
    "A3 average from zero": audited(average_from_zero),
    "A3 average by step": audited(average_by_step),
    "A4 prior by forward": audited(prior_by_forward),
    "A5 temperature": audited(temperature),
    "A6 unused weights": audited(unused_weights),
}
