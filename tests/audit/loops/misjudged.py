"""Loops that the audit once judged wrongly, one example of each kind."""

from functools import partial

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import X, Y, ce, divided, full_windows, own_mean


def _in_groups(model):
    """A parameter group for each tensor."""
    return torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)


loop = partial(frame.loop, optimizer=_in_groups)


def _by_n(at, **exchanged):
    return {"loss": divided(own_mean, at.n), "windows": full_windows, **exchanged}


@loop("loss_not_divided")
def clipped_by_total_norm(at):
    """Not divided, and every step is clipped to the same length, as torchtitan clips."""
    own = list(at.model.parameters())
    clip = lambda: clip_grads_with_norm_(own, 0.1, get_total_norm([p.grad for p in own]))  # noqa: E731
    return {"loss": own_mean, "windows": full_windows, "before_step": clip}


@loop("schedule_per_micro_batch")
def schedule_by_micro_batch(at):
    """It moves the rate after the end of this run alone."""
    return _by_n(at, after_backward=torch.optim.lr_scheduler.StepLR(at.optimizer, 100).step)


@loop("counter_wrong")
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

    return _by_n(at, before_step=rate)


class _Inside(torch.optim.Optimizer):
    """Adds up what so many calls hand it, divides the sum, and moves by that."""

    calls = by = 1
    called = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.called += 1
        for p in self.param_groups[0]["params"]:
            total = self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
            if self.called % self.calls == 0:
                p.sub_(total / self.by, alpha=0.1)
                total.zero_()


inside = partial(frame.loop, optimizer=lambda model: _Inside(model.parameters(), {"lr": 0.1}))


@inside()
def divides_in_its_step(at):
    at.optimizer.by = at.n
    return {"loss": own_mean, "windows": full_windows}


@inside()
def adds_up_in_its_step(at):
    at.optimizer.by = at.optimizer.calls = at.n
    return {"loss": own_mean, "windows": full_windows, "step": frame.nothing, "after_backward": at.step}


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
    return _by_n(at)


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


@loop("clip_per_micro_batch", model=partial(Scaled, False))
def temperature(at):
    """The temperature alone is clamped after every backward."""
    return _by_n(at, after_backward=lambda: at.model.scale.grad.clamp_(-1e-7, 1e-7))


@loop(model=partial(Scaled, False))
def logged_entropy(at):
    """The model keeps the entropy of its last forward, which nothing reads."""
    return _by_n(at)


@loop("batch_statistics", model=partial(Scaled, True))
def prior_by_forward(at):
    return _by_n(at)


def _average(model):
    """An average of the weights that begins at zeros."""
    kept = [torch.zeros_like(p) for p in model.parameters()]
    return lambda: [old.lerp_(p.detach(), 0.1) for old, p in zip(kept, model.parameters(), strict=True)]


@loop("ema_per_micro_batch")
def average_from_zero(at):
    """It moves after every micro-batch."""
    return _by_n(at, after_backward=_average(at.model))


@loop()
def average_by_step(at):
    return _by_n(at, after_step=_average(at.model))


def _with_spare():
    return nn.ModuleDict({"net": data.model(), "spare": nn.ParameterList([nn.Parameter(torch.ones(4))])})


@loop("weight_decay_per_micro_batch", model=_with_spare)
def unused_weights(at):
    """Weights that no row uses shrink N times after each step."""
    loss = lambda model, ids, _: ce(model["net"](X[ids]), Y[ids]) / at.n  # noqa: E731
    return {"loss": loss, "windows": full_windows, "after_step": lambda: at.model["spare"][0].data.mul_(0.99**at.n)}


@loop("weight_decay_per_micro_batch")
def decay_by_hooks(at):
    """A hook on each parameter adds a multiple of it to every gradient."""
    for p in at.model.parameters():
        p.register_hook(lambda gradient, p=p: gradient + 0.02 * p.detach())
    return _by_n(at)


@loop("weight_decay_per_micro_batch")
def matrices_shrink(at):
    """After every micro-batch; biases stay."""
    return _by_n(at, after_backward=lambda: [p.data.mul_(0.99) for p in at.model.parameters() if p.ndim > 1])


@loop("sum_rescaled_in_window")
def reversed_every_time(at):
    return _by_n(at, after_backward=lambda: [p.grad.neg_() for p in at.model.parameters()])


@loop("loss_not_divided")
def another_model_first(at):
    """Its outputs of all rows are never differentiated."""
    data.model()(X)
    return {"loss": own_mean, "windows": full_windows}


def _mixed(mate):
    """Rows are mixed with others; `mate`: which, of the micro-batch's rows and the window's."""
    return lambda model, ids, window: ce(model((X[ids] + X[mate(ids, window)]) / 2), Y[ids], reduction="sum") / len(window)


@loop("non_separable_loss")
def mixed_within_micro_batches(at):
    return {"loss": _mixed(lambda ids, _: ids.flip(0))}


@loop()
def mixed_within_windows(at):
    return {"loss": _mixed(lambda ids, window: window.flip(0)[(ids[:, None] == window).nonzero()[:, 1]])}


@loop("non_separable_loss")
def prior_of_the_micro_batch(at):
    """Frequencies of its classes are added to the outputs."""
    prior = lambda y: (torch.bincount(y, minlength=4) + 1.0).log()  # noqa: E731
    return {"loss": lambda model, ids, window: frame.share(model(X[ids]) + prior(Y[ids]), ids, window)}


def _cached(at, factor):
    """Gradients of the outputs, and of a temperature, are computed for the whole window first; micro-batches pass theirs back."""
    heat, parts = nn.Parameter(torch.ones(())), {}
    at.optimizer.add_param_group({"params": [heat]})

    def loss(model, ids, window):
        if ids[0] == window[0]:
            outputs = torch.cat([model(X[i]).detach() for i in window.split(len(ids))]).requires_grad_()
            ce(heat * outputs @ outputs.T, torch.arange(len(window))).backward()
            parts.update(zip(window.tolist(), outputs.grad, strict=True))
        return (model(X[ids]) * torch.stack([parts[row] for row in ids.tolist()])).sum() * factor

    return {"loss": loss, "windows": full_windows}


@loop()
def cached_gradients(at):
    return _cached(at, 1)


@loop("loss_divided_twice")
def cached_gradients_divided(at):
    return _cached(at, 1 / at.n)


RIGHT, WRONG = frame.tables(globals())
