"""Loops in which nothing is compared: two of their runs agree for no good reason."""

from __future__ import annotations

import torch
from torch import nn

from scoreboard import data
from tests.audit.loops import frame, lost_gradients
from tests.audit.loops.frame import Loop, X, Y, ce, sgd, train


def ignores_its_arguments(batch_size: int, accumulation_steps: int) -> None:
    """Four micro-batches of four rows, whatever is asked for, and not divided."""
    train(4, 4, data.model(), frame.own_mean)


def never_accumulates(batch_size: int, accumulation_steps: int) -> None:
    """One batch of 16 rows, whatever is asked for."""
    train(16, 1, data.model())


def always_two_parts(batch_size: int, accumulation_steps: int) -> None:
    """Every window is cut in two, whatever N says."""
    train(batch_size * accumulation_steps // 2, 2, data.model(), frame.own_mean, windows=frame.full_windows)


def outputs_detached(batch_size: int, accumulation_steps: int) -> None:
    """No backward reaches the weights."""
    model = data.model()
    optimizer = sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            ce(model(X[ids]).detach().requires_grad_(), Y[ids]).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()


def weights_frozen(batch_size: int, accumulation_steps: int) -> None:
    """The optimizer holds weights that need no gradient."""
    model, head = data.model(), nn.Linear(data.CLASSES, 2)
    optimizer = sgd(model)
    model.requires_grad_(False)
    train(batch_size, accumulation_steps, model, lambda m, ids, _: head(m(X[ids])).sum(), optimizer)


def loss_of_zero(batch_size: int, accumulation_steps: int) -> None:
    train(batch_size, accumulation_steps, data.model(), lambda model, ids, window: 0.0 * frame.own_mean(model, ids, window))


def rate_too_small(batch_size: int, accumulation_steps: int) -> None:
    """No step moves a weight."""
    model = data.model()
    train(batch_size, accumulation_steps, model, frame.own_mean, sgd(model, lr=1e-12))


def scaler_leaves_out_every_step(batch_size: int, accumulation_steps: int) -> None:
    model = data.model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, backoff_factor=0.9999)
    scaled = frame.scaled(scaler, sgd(model), frame.divided(frame.own_mean, 1e-30))
    train(batch_size, accumulation_steps, model, **scaled)


CALLS: list[int] = []


def raises_when_run_again(batch_size: int, accumulation_steps: int) -> None:
    CALLS.append(accumulation_steps)
    if accumulation_steps == 1 and CALLS.count(1) > 1:
        raise RuntimeError("address already in use")
    train(batch_size, accumulation_steps, data.model(), frame.own_mean)


EMPTY: dict[Loop, str] = {  # and words of what the report says
    ignores_its_arguments: "does not use its arguments",
    never_accumulates: "does not use its arguments",
    always_two_parts: "does not use its arguments",
    lost_gradients.cleared_before_the_step: "steps without gradients",
    outputs_detached: "takes a gradient other than zero",
    weights_frozen: "takes a gradient other than zero",
    loss_of_zero: "takes a gradient other than zero",
    rate_too_small: "no optimizer step moves a weight (learning rates 1e-12)",
    scaler_leaves_out_every_step: "leaves out every optimizer step",
    raises_when_run_again: "address already in use",
}
