"""Pairs of loops: target networks, gradients cleared before they are used, checkpoints inside a window."""

import copy
import io
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import X, divided, full_windows, loop, mean_over_window, nothing, sgd


def _network():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(data.FEATURES, 16), nn.Tanh(), nn.Linear(16, 6))
    return nn.Sequential(encoder, nn.Linear(6, 6))


def _bootstrap(online, moved, *, whole):
    """As in BYOL, a network predicts what a slowly moving copy of its encoder (or of all of it) makes of another view.

    `moved`: the stage in which the copy moves.
    """
    copied = online if whole else online[0]
    target = copy.deepcopy(copied).requires_grad_(False)

    def loss(model, ids, window):
        with torch.no_grad():
            wanted = functional.normalize(target(X[ids] + 0.1), dim=1)
        return (functional.normalize(model(X[ids]), dim=1) - wanted).square().sum() / len(window)

    def move():
        with torch.no_grad():
            for kept, new in zip(target.parameters(), copied.parameters(), strict=True):
                kept.lerp_(new, 0.2)

    return {"loss": loss, moved: move}


_BYOL = {"model": _network, "optimizer": partial(sgd, lr=0.5)}


@loop(**_BYOL)
def target_of_the_encoder(at):
    """The target, a copy of the encoder, moves after every step."""
    return _bootstrap(at.model, "after_step", whole=False)


@loop("ema_per_micro_batch", **_BYOL)
def target_of_the_encoder_inside(at):
    """The target, a copy of the encoder, moves after every micro-batch."""
    return _bootstrap(at.model, "after_micro_batch", whole=False)


@loop("ema_per_micro_batch", **_BYOL)
def target_of_everything_inside(at):
    """The target, a copy of the whole network, moves after every micro-batch."""
    return _bootstrap(at.model, "after_micro_batch", whole=True)


@loop()
def cleared_after_the_step(at):
    """Gradients are cleared once, after the step: the independent reference of those below."""
    return {}


@loop("gradients_cleared_in_window")
def cleared_before_the_step(at):
    """Gradients are cleared between the last backward and the step, at every N alike: only a reference shows it."""
    return {"before_step": at.model.zero_grad}


@loop("gradients_cleared_in_window")
def cleared_before_the_last(at):
    """Gradients are cleared before the last backward of a window."""
    for ids, window, last in frame.micro_batches(at.size, at.n, data.windows):
        if last:
            at.model.zero_grad()
        mean_over_window(at.model, ids, window).backward()
        if last:
            at.step()


@loop("gradients_cleared_in_window")
def cleared_after_each(at):
    """Gradients are cleared after every backward, at every N alike: only a reference shows it."""
    return {"after_backward": at.model.zero_grad}


@loop("gradients_cleared_in_window")
def head_cleared_before_the_step(at):
    """The last layer's gradients are cleared before the step, at every N alike: only a reference shows it."""
    return {"before_step": at.model[-1].zero_grad}


@loop("gradients_cleared_in_window")
def head_cleared_between(at):
    """The last layer's gradients are cleared before every backward."""
    return {"before_backward": at.model[-1].zero_grad}


def _saved(model, optimizer):
    """What a checkpoint holds, written to a file and read again."""
    file = io.BytesIO()
    gradients = [p.grad for p in model.parameters()]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "gradients": gradients}, file)
    file.seek(0)
    return torch.load(file)


_ADAM = frame.adam(0.01)


def _interrupted(at, make=_ADAM, *, fresh, gradients=False, restart=False):
    """Stop halfway through the second window, and load what was saved.

    The model and optimizer are made anew (`fresh`) or loaded in place; `.grad` comes back with them (`gradients`) or is lost; the
    window goes on, or its first micro-batches run again (`restart`).
    """
    at.optimizer = make(at.model)
    for step, (window, parts) in enumerate(at.windows(full_windows)):
        stop = len(parts) // 2 if step == 1 and len(parts) > 1 else None
        place = 0
        while place < len(parts):
            if place == stop:
                stop, checkpoint = None, _saved(at.model, at.optimizer)
                if fresh:
                    at.model = data.model()
                    at.optimizer = make(at.model)
                at.model.load_state_dict(checkpoint["model"])
                at.optimizer.load_state_dict(checkpoint["optimizer"])
                frame.assign(at.model, checkpoint["gradients"] if gradients else [None] * len(checkpoint["gradients"]))
                place = 0 if restart else place
            mean_over_window(at.model, parts[place], window).backward()
            place += 1


@loop(optimizer=nothing)
def reloaded_in_place_with_gradients(at):
    """The model and Adam at hand are loaded, and the gradients so far."""
    _interrupted(at, fresh=False, gradients=True)


@loop(optimizer=nothing)
def window_begun_again(at):
    """The gradients so far are thrown away, and the window's first micro-batches run again."""
    _interrupted(at, fresh=True, restart=True)


@loop(optimizer=nothing)
def window_begun_again_in_place(at):
    """The same with the model and optimizer at hand."""
    _interrupted(at, fresh=False, restart=True)


@loop("resume_in_window", optimizer=nothing)
def reloaded_in_place_without_gradients(at):
    """The model and optimizer at hand are loaded; the gradients so far are lost."""
    _interrupted(at, fresh=False)


@loop(optimizer=nothing)
def resumed_with_gradients(at):
    """A new model and SGD with momentum are loaded, and the gradients so far."""
    _interrupted(at, partial(sgd, momentum=0.9), fresh=True, gradients=True)


@loop("resume_in_window", optimizer=nothing)
def resumed_inside(at):
    """A new model and SGD with momentum are loaded; the gradients so far are lost."""
    _interrupted(at, partial(sgd, momentum=0.9), fresh=True)


class Tidy(torch.optim.SGD):
    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.05)

    def step(self, closure=None):
        result = super().step(closure)
        self.zero_grad()
        return result


@loop(optimizer=Tidy)
def clears_in_its_step(at):
    """The optimizer clears gradients at the end of its step."""
    return {"clear": nothing}


@loop("loss_not_divided", optimizer=Tidy)
def clears_in_its_step_not_divided(at):
    """The same with a loss that is N times too large."""
    return {"loss": divided(mean_over_window, 1 / at.n), "clear": nothing}


AT_EVERY_N = {  # seen beside `cleared_after_the_step` only
    loop: vars(loop)["causes"] for loop in (cleared_before_the_step, cleared_after_each, head_cleared_before_the_step)
}
RIGHT, WRONG = frame.tables(globals(), AT_EVERY_N)
