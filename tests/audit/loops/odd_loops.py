"""Loops that an attack on the audit tried: right ones that look wrong, and wrong ones that look right or like something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, Loop, X, Y, ce, sgd, train


def clipped_times_n_then_divided(batch_size: int, accumulation_steps: int) -> None:
    """The undivided sum is clipped to N times the limit, and divided by N: that is clipping the mean to the limit."""
    model = data.model()
    clip = frame.clip(model, 0.1 * accumulation_steps)

    def before_step() -> None:
        clip()
        frame.divide_gradients(model, accumulation_steps)

    train(batch_size, accumulation_steps, model, frame.own_mean, windows=frame.full_windows, before_step=before_step)


def clipped_to_another_limit(batch_size: int, accumulation_steps: int) -> None:
    """The limit is divided by N."""
    model = data.model()
    train(batch_size, accumulation_steps, model, before_step=frame.clip(model, 0.2 / accumulation_steps))


def running_mean(batch_size: int, accumulation_steps: int) -> None:
    """A mean of the micro-batches so far is kept in a buffer."""
    _averaged(batch_size, accumulation_steps, 1)


def running_mean_ahead(batch_size: int, accumulation_steps: int) -> None:
    """The number of micro-batches so far is one too large."""
    _averaged(batch_size, accumulation_steps, 2)


def _averaged(batch_size: int, accumulation_steps: int, ahead: int) -> None:
    model = data.model()
    optimizer = sgd(model)
    for window in frame.full_windows(batch_size * accumulation_steps):
        means: list[Tensor] = []
        for place, ids in enumerate(window.split(batch_size)):
            optimizer.zero_grad()
            frame.own_mean(model, ids, window).backward()
            given = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            means = [mean + (g - mean) / (place + ahead) for mean, g in zip(means, given, strict=True)] if place else given
        for p, mean in zip(model.parameters(), means, strict=True):
            p.grad = mean
        optimizer.step()


def centred_every_time(batch_size: int, accumulation_steps: int) -> None:
    """The sum so far is projected after every micro-batch: a projection is linear, and the second one changes nothing."""
    model = data.model()

    def centre() -> None:
        for p in model.parameters():
            if p.grad is not None and p.ndim > 1:
                p.grad -= p.grad.mean(1, keepdim=True)

    train(batch_size, accumulation_steps, model, after_backward=centre)


def projected_after_the_step(batch_size: int, accumulation_steps: int) -> None:
    """Weights are put back on the unit sphere after every optimizer step."""
    model = data.model()

    def project() -> None:
        with torch.no_grad():
            weight = model[0].weight
            weight.div_(weight.norm(dim=1, keepdim=True))

    train(batch_size, accumulation_steps, model, after_step=project)


def pulled_back_after_the_step(batch_size: int, accumulation_steps: int) -> None:
    """With accumulation alone, weights go back a tenth of the step."""
    model = data.model()
    before = [p.detach().clone() for p in model.parameters()]

    def keep() -> None:
        for old, p in zip(before, model.parameters(), strict=True):
            old.copy_(p.detach())

    def pull() -> None:
        with torch.no_grad():
            for old, p in zip(before, model.parameters(), strict=True):
                p.lerp_(old, 0.1 * (accumulation_steps > 1))

    train(batch_size, accumulation_steps, model, before_step=keep, after_step=pull)


def root_of_the_own_mean(batch_size: int, accumulation_steps: int) -> None:
    """The root of a mean of squares, by micro-batch: right weights add up to almost 1, and are no numbers of terms."""

    def loss(model: Any, ids: Tensor, window: Tensor) -> Tensor:
        return (model(X[ids]) - functional.one_hot(Y[ids], data.CLASSES)).square().mean().sqrt() / accumulation_steps

    train(batch_size, accumulation_steps, data.model(), loss, windows=frame.full_windows)


def mixed_with_own_frequencies(batch_size: int, accumulation_steps: int) -> None:
    """Targets are mixed with the frequencies of the classes in the micro-batch."""

    def loss(model: Any, ids: Tensor, window: Tensor) -> Tensor:
        classes = functional.one_hot(Y[ids], data.CLASSES).float()
        return ce(model(X[ids]), 0.9 * classes + 0.1 * classes.mean(0), reduction="sum") / len(window)

    train(batch_size, accumulation_steps, data.model(), loss)


def carried_state(batch_size: int, accumulation_steps: int) -> None:
    """A state goes on from one micro-batch of the window to the next."""
    torch.manual_seed(0)
    cell, head = nn.GRUCell(data.FEATURES, 16), nn.Linear(16, data.CLASSES)
    optimizer = sgd(nn.ModuleList([cell, head]))
    for window in frame.full_windows(batch_size * accumulation_steps):
        state = torch.zeros(1, 16)
        for ids in window.split(batch_size):
            hidden = cell(X[ids], state.expand(len(ids), 16))
            (ce(head(hidden), Y[ids], reduction="sum") / len(window)).backward()
            state = hidden.mean(0, keepdim=True).detach()
        optimizer.step()
        optimizer.zero_grad()


def signs_added(batch_size: int, accumulation_steps: int) -> None:
    """Each micro-batch gives the signs of its gradient."""
    model = data.model()
    optimizer = sgd(model, lr=0.01)
    for window in frame.full_windows(batch_size * accumulation_steps):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for ids in window.split(batch_size):
            optimizer.zero_grad()
            frame.mean_over_window(model, ids, window).backward()
            for sum_of_signs, p in zip(total, model.parameters(), strict=True):
                sum_of_signs += p.grad.sign() / accumulation_steps if p.grad is not None else 0
        for sum_of_signs, p in zip(total, model.parameters(), strict=True):
            p.grad = sum_of_signs
        optimizer.step()


def body_steps_every_time(batch_size: int, accumulation_steps: int) -> None:
    """Of two optimizers, that of the first layer steps after every micro-batch."""
    model = data.model()
    body, head = sgd(model[0]), sgd(model[2])
    for ids, window, last in frame.micro_batches(batch_size, accumulation_steps, frame.full_windows):
        frame.mean_over_window(model, ids, window).backward()
        for optimizer in (body, head) if last else (body,):
            optimizer.step()
            optimizer.zero_grad()


def weighed_tokens(batch_size: int, accumulation_steps: int) -> None:
    """Tokens are weighed by deviations of their number from the mean of the micro-batch."""

    def loss(model: Any, ids: Tensor, window: Tensor) -> Tensor:
        targets, used = TOKENS[ids, 1:], TOKENS[ids, 1:] != 0
        numbers = targets.float()
        apart = (numbers - numbers[used].mean()) / numbers[used].std()
        each = ce(model(TOKENS[ids])[:, :-1].transpose(1, 2), targets, reduction="none")
        return (each * apart * used).sum() / data.num_targets(TOKENS[window])

    train(batch_size, accumulation_steps, data.language_model(), loss)


def two_parts_at_one(batch_size: int, accumulation_steps: int) -> None:
    """N=1 is the wrong one: it adds two halves."""
    model = data.model()
    optimizer = sgd(model)
    for window in frame.full_windows(batch_size * accumulation_steps):
        for ids in window.chunk(max(2, accumulation_steps)):
            (frame.own_mean(model, ids, window) / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


WRONG: dict[Loop, set[str]] = {
    clipped_to_another_limit: {"unexplained"},
    running_mean_ahead: {"unexplained"},
    pulled_back_after_the_step: {"unexplained"},
    root_of_the_own_mean: {"normaliser_depends_on_split"},
    mixed_with_own_frequencies: {"unexplained"},
    carried_state: {"stateful_forward"},
    signs_added: {"unexplained"},
    body_steps_every_time: {"step_every_micro_batch"},
    weighed_tokens: {"normaliser_depends_on_split"},
    two_parts_at_one: {"counter_wrong"},
}
RIGHT = frame.unlisted(globals(), WRONG)
SAID: dict[Loop, str] = {
    clipped_to_another_limit: "clipped to 0.05 where N=1 clips to 0.2",
    running_mean_ahead: "micro-batches count 0.4, 0.2, 0.2, 0.2 times",
    mixed_with_own_frequencies: "statistics of the micro-batch, or other targets",
}
