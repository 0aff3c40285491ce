"""The training loop that everyone writes, in stages.

A loop of this folder exchanges a stage, or is written out in full where the order of its calls is the point.
"""

from dataclasses import dataclass
from functools import partial
from inspect import isfunction
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from scoreboard import data

ce = functional.cross_entropy
# Loss: (model, rows of the micro-batch, rows of its window) -> what is differentiated
# Windows: rows per window -> the row numbers of each window

X, Y = data.images()  # [40, 12] rows and [40] classes
TOKENS = data.sentences()  # [40, 12], padded with 0 to unequal lengths
full_windows = partial(data.windows, keep=False)  # without the short window at the end of each epoch


def sgd(model, lr=0.1, momentum=0.0):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def share(outputs, ids, window):
    """Return the micro-batch's share of the mean over the window's rows; the shares add up to that mean."""
    return ce(outputs, Y[ids], reduction="sum") / len(window)


def mean_over_window(model, ids, window):
    """Return the share of the outputs of a model that takes rows."""
    return share(model(X[ids]), ids, window)


def own_mean(model, ids, window):
    """Return the mean over the micro-batch's own rows."""
    return ce(model(X[ids]), Y[ids])


def trimmed(ids):
    """Return sentences up to the end of the longest of them."""
    return TOKENS[ids, : int((TOKENS[ids] != 0).sum(1).max())]


def token_mean_over_window(model, ids, window):
    """Return the micro-batch's share of the mean over the window's tokens."""
    return data.token_loss(model(TOKENS[ids]), TOKENS[ids]) / data.num_targets(TOKENS[window])


def own_token_mean(model, ids, window):
    """Return the mean over the micro-batch's own tokens."""
    return data.token_loss(model(TOKENS[ids]), TOKENS[ids], "mean")


def divided(loss, by):
    """Divide a loss by a number that no window changes: `loss / N`."""
    return lambda model, ids, window: loss(model, ids, window) / by


def micro_batches(batch_size, accumulation_steps, windows):
    """Yield the rows of each micro-batch, the rows of its window, and whether it is the window's last."""
    for window in windows(batch_size * accumulation_steps):
        parts = window.split(batch_size)
        for k, ids in enumerate(parts):
            yield ids, window, k == len(parts) - 1


def nothing(*_):
    """Fill the place of a stage that is left out, or of an optimizer."""


def train(
    batch_size,
    accumulation_steps,
    model,
    loss=mean_over_window,
    optimizer=None,
    *,
    windows=data.windows,
    before_backward=nothing,
    after_backward=nothing,
    before_step=nothing,
    step=None,
    after_step=nothing,
    clear=None,
    after_micro_batch=nothing,
):
    """Add up the gradients of each window, step once at its end, then clear. Return the sum of the losses of each window.

    By default the loop is right; its optimizer is SGD with learning rate 0.1.
    """
    optimizer = optimizer or sgd(model)
    step, clear = step or optimizer.step, clear or optimizer.zero_grad
    losses = [0.0]
    for ids, window, last in micro_batches(batch_size, accumulation_steps, windows):
        before_backward()
        part = loss(model, ids, window)
        part.backward()
        losses[-1] += part.item()
        after_backward()
        if last:
            before_step()
            step()
            after_step()
            clear()
            losses.append(0.0)
        after_micro_batch()
    return losses[:-1]


def scaled(scaler, optimizer, loss=mean_over_window):
    """Return the stages of `train` that a GradScaler replaces."""
    stages = {"step": lambda: scaler.step(optimizer), "after_step": scaler.update}
    return {"optimizer": optimizer, "loss": lambda *of: scaler.scale(loss(*of)), **stages}


def train_by_closure(batch_size, accumulation_steps, model, optimizer, loss=mean_over_window, windows=data.windows):
    """Run the backwards of a whole window inside the optimizer's step, each time from cleared gradients."""
    for window in windows(batch_size * accumulation_steps):

        def closure(window=window):
            optimizer.zero_grad()
            value = 0.0
            for ids in window.split(batch_size):
                part = loss(model, ids, window)
                part.backward()
                value += part.item()
            return value

        optimizer.step(closure)


def clip(model, max_norm):
    return lambda: clip_grad_norm_(model.parameters(), max_norm)


def divide_gradients(model, by):
    for p in model.parameters():
        p.grad /= by


class Buffer:
    """Sums of gradients that a loop keeps beside `.grad`, which it clears before every backward."""

    def __init__(self, model, dtype=torch.float32):
        self.model = model
        self.sums = [torch.zeros_like(p, dtype=dtype) for p in model.parameters()]

    def add(self):
        for total, p in zip(self.sums, self.model.parameters(), strict=True):
            total += p.grad if p.grad is not None else 0.0

    def hand_over(self):
        """Assign the sums, in float32, as the gradients."""
        for total, p in zip(self.sums, self.model.parameters(), strict=True):
            p.grad = total.to(torch.float32, copy=True)

    def empty(self):
        for total in self.sums:
            total.zero_()

    def stages(self):
        """Return the stages of `train` in which the buffer takes part."""
        around = {"before_backward": self.model.zero_grad, "after_backward": self.add}
        return {**around, "before_step": self.hand_over, "after_step": self.empty}


class Average:
    """An exponential moving average of a model's weights."""

    def __init__(self, model):
        self.model = model
        self.kept = [p.detach().clone() for p in model.parameters()]

    def update(self):
        for kept, p in zip(self.kept, self.model.parameters(), strict=True):
            kept.lerp_(p.detach(), 0.1)


def adversaries():
    """Return a generator, a discriminator, and the noise [40, 4] that the generator starts from."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, data.FEATURES), nn.Sequential(nn.Linear(data.FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    return maker, judge, torch.randn(data.SAMPLES, 4, generator=torch.Generator().manual_seed(5))


@dataclass
class At:
    """One run of a loop: its sizes, its model and its optimizer."""

    size: int  # rows of a micro-batch
    n: int
    model: Any
    optimizer: torch.optim.Optimizer

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def windows(self, windows=data.windows):
        """Each window and its micro-batches, after which the optimizer steps and gradients are cleared."""
        for window in windows(self.size * self.n):
            yield window, window.split(self.size)
            self.step()


def loop(*causes, model=None, optimizer=sgd):
    """Make a training function of `made(at)`, which gives what is exchanged of `train`, or nothing where it has trained itself.

    The function is right, or wrong for these causes; with a model and an optimizer of `data.model()` unless they are given.
    """

    def of(made):
        def trained(batch_size, accumulation_steps):
            own = (model or data.model)()
            at = At(batch_size, accumulation_steps, own, optimizer(own))
            if (exchanged := made(at)) is not None:
                train(batch_size, accumulation_steps, own, **{"optimizer": at.optimizer} | exchanged)

        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(trained, name, getattr(made, name))
        return vars(trained).update(causes={*causes}) or trained

    return of


def wrong(*causes):
    """Mark a function that is written out in full as wrong."""
    return lambda written: vars(written).update(causes={*causes}) or written


def adam(lr):
    return lambda model: torch.optim.Adam(model.parameters(), lr=lr)


def adamw(lr, **options):
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr, **options)


def assign(model, gradients):
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient


def words():
    return data.language_model()


def tables(module, *others):
    """Return the public functions of a module that are right, and those that are wrong with their causes."""
    own = [item for item in module.values() if isfunction(item) and item.__module__ == module["__name__"]]
    public = [item for item in own if not item.__name__.startswith("_") and all(item not in other for other in others)]
    wrong = {item: vars(item)["causes"] for item in public if vars(item).get("causes")}
    return tuple(item for item in public if item not in wrong), wrong
