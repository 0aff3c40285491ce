"""Loops in which nothing is compared: two of their runs agree for no good reason."""

from functools import partial

import torch
from torch import nn

from scoreboard import data
from tests.audit.loops import frame, lost_gradients
from tests.audit.loops.frame import X, Y, ce, loop, own_mean, sgd, train


def ignores_its_arguments(batch_size, accumulation_steps):
    """Four micro-batches of four rows, whatever is asked for, and not divided."""
    train(4, 4, data.model(), own_mean)


def never_accumulates(batch_size, accumulation_steps):
    """One batch of 16 rows, whatever is asked for."""
    train(16, 1, data.model())


def always_two_parts(batch_size, accumulation_steps):
    """Every window is cut in two, whatever N says."""
    train(batch_size * accumulation_steps // 2, 2, data.model(), own_mean, windows=frame.full_windows)


@loop()
def outputs_detached(at):
    """No backward reaches the weights."""
    for _, parts in at.windows():
        for ids in parts:
            ce(at.model(X[ids]).detach().requires_grad_(), Y[ids]).backward()
        frame.assign(at.model, map(torch.zeros_like, at.model.parameters()))


@loop()
def weights_frozen(at):
    """The optimizer holds weights that need no gradient."""
    head = nn.Linear(data.CLASSES, 2)
    at.model.requires_grad_(False)
    return {"loss": lambda m, ids, _: head(m(X[ids])).sum()}


@loop()
def loss_of_zero(at):
    return {"loss": frame.divided(own_mean, torch.inf)}


@loop(optimizer=partial(sgd, lr=1e-12))
def rate_too_small(at):
    """No step moves a weight."""
    return {"loss": own_mean}


@loop()
def scaler_leaves_out_every_step(at):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, backoff_factor=0.9999)
    return frame.scaled(scaler, at.optimizer, frame.divided(own_mean, 1e-30))


CALLS = []


def raises_when_run_again(batch_size, accumulation_steps):
    CALLS.append(accumulation_steps)
    if accumulation_steps == 1 and CALLS.count(1) > 1:
        raise RuntimeError("address already in use")
    train(batch_size, accumulation_steps, data.model(), own_mean)


EMPTY = {  # and words of what the report says
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
