"""Pairs of loops: target networks, gradients cleared before they are used, checkpoints inside a window."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import X, divided, full_windows, mean_over_window, nothing, sgd, train


def _bootstrap(*, whole: bool) -> tuple[nn.Module, frame.Loss, frame.Stage]:
    """As in BYOL, a network predicts what a slowly moving copy of its encoder (or of all of it) makes of another view.

    Return the network, its loss, and the stage that moves the copy.
    """
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(data.FEATURES, 16), nn.Tanh(), nn.Linear(16, 6))
    online = nn.Sequential(encoder, nn.Linear(6, 6))
    copied = online if whole else encoder
    target = copy.deepcopy(copied).requires_grad_(False)

    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = functional.normalize(target(X[ids] + 0.1), dim=1)
        return (functional.normalize(model(X[ids]), dim=1) - wanted).square().sum() / len(window)

    def move() -> None:
        with torch.no_grad():
            for kept, new in zip(target.parameters(), copied.parameters(), strict=True):
                kept.lerp_(new, 0.2)

    return online, loss, move


def target_of_the_encoder(batch_size: int, accumulation_steps: int) -> None:
    """The target, a copy of the encoder, moves after every step."""
    online, loss, move = _bootstrap(whole=False)
    train(batch_size, accumulation_steps, online, loss, sgd(online, lr=0.5), after_step=move)


def target_of_the_encoder_inside(batch_size: int, accumulation_steps: int) -> None:
    """The target, a copy of the encoder, moves after every micro-batch."""
    online, loss, move = _bootstrap(whole=False)
    train(batch_size, accumulation_steps, online, loss, sgd(online, lr=0.5), after_micro_batch=move)


def target_of_everything_inside(batch_size: int, accumulation_steps: int) -> None:
    """The target, a copy of the whole network, moves after every micro-batch."""
    online, loss, move = _bootstrap(whole=True)
    train(batch_size, accumulation_steps, online, loss, sgd(online, lr=0.5), after_micro_batch=move)


def cleared_after_the_step(batch_size: int, accumulation_steps: int) -> None:
    """Gradients are cleared once, after the step: the independent reference of those below."""
    train(batch_size, accumulation_steps, data.model())


def cleared_before_the_step(batch_size: int, accumulation_steps: int) -> None:
    """Gradients are cleared between the last backward and the step, at every N alike: only a reference shows it."""
    model = data.model()
    train(batch_size, accumulation_steps, model, before_step=model.zero_grad)


def cleared_before_the_last(batch_size: int, accumulation_steps: int) -> None:
    """Gradients are cleared before the last backward of a window."""
    model = data.model()
    optimizer = sgd(model)
    for ids, window, last in frame.micro_batches(batch_size, accumulation_steps, data.windows):
        if last:
            model.zero_grad()
        mean_over_window(model, ids, window).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def cleared_after_each(batch_size: int, accumulation_steps: int) -> None:
    """Gradients are cleared after every backward, at every N alike: only a reference shows it."""
    model = data.model()
    train(batch_size, accumulation_steps, model, after_backward=model.zero_grad)


def head_cleared_before_the_step(batch_size: int, accumulation_steps: int) -> None:
    """The last layer's gradients are cleared before the step, at every N alike: only a reference shows it."""
    model = data.model()
    train(batch_size, accumulation_steps, model, before_step=model[-1].zero_grad)


def head_cleared_between(batch_size: int, accumulation_steps: int) -> None:
    """The last layer's gradients are cleared before every backward."""
    model = data.model()
    train(batch_size, accumulation_steps, model, before_backward=model[-1].zero_grad)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds, written to a file and read again."""
    file = io.BytesIO()
    gradients = [p.grad for p in model.parameters()]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "gradients": gradients}, file)
    file.seek(0)
    kept: dict[str, Any] = torch.load(file)
    return kept


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.9)


def _interrupted(
    batch_size: int, accumulation_steps: int, make: Make = _adam, *, fresh: bool, gradients: bool = False, restart: bool = False
) -> None:
    """Stop halfway through the second window, and load what was saved.

    The model and optimizer are made anew (`fresh`) or loaded in place; `.grad` comes back with them (`gradients`) or is lost; the
    window goes on, or its first micro-batches run again (`restart`).
    """
    model = data.model()
    optimizer = make(model)
    for step, window in enumerate(full_windows(batch_size * accumulation_steps)):
        parts = list(window.split(batch_size))
        stop = len(parts) // 2 if step == 1 and len(parts) > 1 else None
        place = 0
        while place < len(parts):
            if place == stop:
                stop, checkpoint = None, _saved(model, optimizer)
                if fresh:
                    model = data.model()
                    optimizer = make(model)
                model.load_state_dict(checkpoint["model"])
                optimizer.load_state_dict(checkpoint["optimizer"])
                for p, kept in zip(model.parameters(), checkpoint["gradients"], strict=True):
                    p.grad = kept if gradients else None
                place = 0 if restart else place
            mean_over_window(model, parts[place], window).backward()
            place += 1
        optimizer.step()
        optimizer.zero_grad()


def reloaded_with_gradients(batch_size: int, accumulation_steps: int) -> None:
    """A new model and optimizer are loaded, and the gradients so far."""
    _interrupted(batch_size, accumulation_steps, fresh=True, gradients=True)


def reloaded_in_place_with_gradients(batch_size: int, accumulation_steps: int) -> None:
    """The model and optimizer at hand are loaded, and the gradients so far."""
    _interrupted(batch_size, accumulation_steps, fresh=False, gradients=True)


def window_begun_again(batch_size: int, accumulation_steps: int) -> None:
    """The gradients so far are thrown away, and the window's first micro-batches run again."""
    _interrupted(batch_size, accumulation_steps, fresh=True, restart=True)


def window_begun_again_in_place(batch_size: int, accumulation_steps: int) -> None:
    """The same with the model and optimizer at hand."""
    _interrupted(batch_size, accumulation_steps, fresh=False, restart=True)


def reloaded_without_gradients(batch_size: int, accumulation_steps: int) -> None:
    """A new model and optimizer are loaded; the gradients so far are lost."""
    _interrupted(batch_size, accumulation_steps, fresh=True)


def reloaded_in_place_without_gradients(batch_size: int, accumulation_steps: int) -> None:
    """The model and optimizer at hand are loaded; the gradients so far are lost."""
    _interrupted(batch_size, accumulation_steps, fresh=False)


def resumed_with_gradients(batch_size: int, accumulation_steps: int) -> None:
    """A new model and SGD with momentum are loaded, and the gradients so far."""
    _interrupted(batch_size, accumulation_steps, _sgd, fresh=True, gradients=True)


def resumed_inside(batch_size: int, accumulation_steps: int) -> None:
    """A new model and SGD with momentum are loaded; the gradients so far are lost."""
    _interrupted(batch_size, accumulation_steps, _sgd, fresh=True)


class Tidy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.zero_grad()
        return result


def clears_in_its_step(batch_size: int, accumulation_steps: int) -> None:
    """The optimizer clears gradients at the end of its step."""
    model = data.model()
    train(batch_size, accumulation_steps, model, optimizer=Tidy(model.parameters(), lr=0.05), clear=nothing)


def clears_in_its_step_not_divided(batch_size: int, accumulation_steps: int) -> None:
    """The same with a loss that is N times too large."""
    model = data.model()
    added = divided(mean_over_window, 1 / accumulation_steps)
    train(batch_size, accumulation_steps, model, added, Tidy(model.parameters(), lr=0.05), clear=nothing)


WRONG: dict[frame.Loop, set[str]] = {
    target_of_the_encoder_inside: {"ema_per_micro_batch"},
    target_of_everything_inside: {"ema_per_micro_batch"},
    cleared_before_the_last: {"gradients_cleared_in_window"},
    head_cleared_between: {"gradients_cleared_in_window"},
    reloaded_without_gradients: {"resume_in_window"},
    reloaded_in_place_without_gradients: {"resume_in_window"},
    resumed_inside: {"resume_in_window"},
    clears_in_its_step_not_divided: {"loss_not_divided"},
}
AT_EVERY_N: dict[frame.Loop, set[str]] = {  # seen beside `cleared_after_the_step` only
    cleared_before_the_step: {"gradients_cleared_in_window"},
    cleared_after_each: {"gradients_cleared_in_window"},
    head_cleared_before_the_step: {"gradients_cleared_in_window"},
}

RIGHT = frame.unlisted(globals(), WRONG, AT_EVERY_N)
