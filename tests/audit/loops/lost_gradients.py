"""Pairs of hand-written loops: target networks, gradients cleared before they are used, checkpoints inside a window."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.trainers import data

ce = functional.cross_entropy


def _micro_batches(batch_size: int, accumulation_steps: int) -> Iterator[tuple[Tensor, int, bool]]:
    """(row numbers, rows of the window, whether it is the window's last)"""
    for window in data.windows(batch_size * accumulation_steps):
        parts = window.split(batch_size)
        for i, ids in enumerate(parts):
            yield ids, len(window), i + 1 == len(parts)


def _loss(model: nn.Module, ids: Tensor, num_rows: int) -> Tensor:
    x, y = data.images()
    return ce(model(x[ids]), y[ids], reduction="sum") / num_rows


# -- target networks that take part in the loss -----------------------------------------------------------------------


def _bootstrapped(batch_size: int, accumulation_steps: int, *, per_micro_batch: bool, whole: bool) -> None:
    """As in BYOL: the network predicts what a slowly moving copy of its encoder (or of all of it) makes of another view."""
    x, _ = data.images()
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(data.FEATURES, 16), nn.Tanh(), nn.Linear(16, 6))
    online = nn.Sequential(encoder, nn.Linear(6, 6))
    copied = online if whole else encoder
    target = copy.deepcopy(copied).requires_grad_(False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.5)
    for ids, num_rows, last in _micro_batches(batch_size, accumulation_steps):
        with torch.no_grad():
            wanted = functional.normalize(target(x[ids] + 0.1), dim=1)
        got = functional.normalize(online(x[ids]), dim=1)
        ((got - wanted).square().sum() / num_rows).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        if last or per_micro_batch:
            with torch.no_grad():
                for kept, new in zip(target.parameters(), copied.parameters(), strict=True):
                    kept.lerp_(new, 0.2)


def target_of_the_encoder(batch_size: int, accumulation_steps: int) -> None:
    _bootstrapped(batch_size, accumulation_steps, per_micro_batch=False, whole=False)


def target_of_the_encoder_inside(batch_size: int, accumulation_steps: int) -> None:
    _bootstrapped(batch_size, accumulation_steps, per_micro_batch=True, whole=False)


def target_of_everything_inside(batch_size: int, accumulation_steps: int) -> None:
    _bootstrapped(batch_size, accumulation_steps, per_micro_batch=True, whole=True)


# -- gradients cleared before they are used ---------------------------------------------------------------------------


def _cleared(batch_size: int, accumulation_steps: int, clear: Callable[[nn.Module, str, bool], None]) -> None:
    """`clear(model, place, last)` is called before and after each backward."""
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, num_rows, last in _micro_batches(batch_size, accumulation_steps):
        clear(model, "before", last)
        _loss(model, ids, num_rows).backward()
        clear(model, "after", last)
        if last:
            optimizer.step()
            optimizer.zero_grad()


def cleared_after_the_step(batch_size: int, accumulation_steps: int) -> None:
    """What the others should be; their independent reference."""
    _cleared(batch_size, accumulation_steps, lambda model, place, last: None)


def cleared_before_the_step(batch_size: int, accumulation_steps: int) -> None:
    """At every N alike: only an independent reference shows it."""
    _cleared(batch_size, accumulation_steps, lambda model, place, last: model.zero_grad() if place == "after" and last else None)


def cleared_before_the_last(batch_size: int, accumulation_steps: int) -> None:
    _cleared(batch_size, accumulation_steps, lambda model, place, last: model.zero_grad() if place == "before" and last else None)


def cleared_after_each(batch_size: int, accumulation_steps: int) -> None:
    _cleared(batch_size, accumulation_steps, lambda model, place, last: model.zero_grad() if place == "after" else None)


def _head(model: nn.Module) -> nn.Module:
    *_, head = model.children()
    return head


def head_cleared_before_the_step(batch_size: int, accumulation_steps: int) -> None:
    _cleared(
        batch_size, accumulation_steps, lambda model, place, last: _head(model).zero_grad() if place == "after" and last else None
    )


def head_cleared_between(batch_size: int, accumulation_steps: int) -> None:
    _cleared(batch_size, accumulation_steps, lambda model, place, last: _head(model).zero_grad() if place == "before" else None)


# -- checkpoints inside a window --------------------------------------------------------------------------------------


def _saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Through a file, as it would be."""
    file = io.BytesIO()
    gradients = [p.grad for p in model.parameters()]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "gradients": gradients}, file)
    file.seek(0)
    kept: dict[str, Any] = torch.load(file)
    return kept


def _reloaded(batch_size: int, accumulation_steps: int, *, fresh: bool, gradients: bool = False, restart: bool = False) -> None:
    """Stopped after 2 micro-batches of the second window; the model and optimizer are made anew (`fresh`) or loaded in place."""
    model = data.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step, window in enumerate(data.windows(16, keep=False)):
        parts = list(window.split(batch_size))
        stop = 2 if step == 1 and len(parts) > 2 else None
        place = 0
        while place < len(parts):
            if place == stop:
                stop, checkpoint = None, _saved(model, optimizer)
                if fresh:
                    model = data.model()
                    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
                model.load_state_dict(checkpoint["model"])
                optimizer.load_state_dict(checkpoint["optimizer"])
                for p, kept in zip(model.parameters(), checkpoint["gradients"], strict=True):
                    p.grad = kept if gradients else None
                place = 0 if restart else place
            _loss(model, parts[place], len(window)).backward()
            place += 1
        optimizer.step()
        optimizer.zero_grad()


def reloaded_with_gradients(batch_size: int, accumulation_steps: int) -> None:
    _reloaded(batch_size, accumulation_steps, fresh=True, gradients=True)


def reloaded_in_place_with_gradients(batch_size: int, accumulation_steps: int) -> None:
    _reloaded(batch_size, accumulation_steps, fresh=False, gradients=True)


def window_begun_again(batch_size: int, accumulation_steps: int) -> None:
    """The gradients so far are thrown away, and the window's first micro-batches run again."""
    _reloaded(batch_size, accumulation_steps, fresh=True, restart=True)


def window_begun_again_in_place(batch_size: int, accumulation_steps: int) -> None:
    _reloaded(batch_size, accumulation_steps, fresh=False, restart=True)


def reloaded_without_gradients(batch_size: int, accumulation_steps: int) -> None:
    _reloaded(batch_size, accumulation_steps, fresh=True)


def reloaded_in_place_without_gradients(batch_size: int, accumulation_steps: int) -> None:
    _reloaded(batch_size, accumulation_steps, fresh=False)


# -- an optimizer that clears gradients itself ------------------------------------------------------------------------


class Tidy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.zero_grad()
        return result


def _tidied(batch_size: int, accumulation_steps: int, factor: float) -> None:
    model = data.model()
    optimizer = Tidy(model.parameters(), lr=0.05)
    for ids, num_rows, last in _micro_batches(batch_size, accumulation_steps):
        (factor * _loss(model, ids, num_rows)).backward()
        if last:
            optimizer.step()


def clears_in_its_step(batch_size: int, accumulation_steps: int) -> None:
    _tidied(batch_size, accumulation_steps, 1.0)


def clears_in_its_step_not_divided(batch_size: int, accumulation_steps: int) -> None:
    _tidied(batch_size, accumulation_steps, float(accumulation_steps))


RIGHT = (
    target_of_the_encoder,
    reloaded_with_gradients,
    reloaded_in_place_with_gradients,
    window_begun_again,
    window_begun_again_in_place,
    clears_in_its_step,
)
WRONG: dict[Callable[..., Any], set[str]] = {
    target_of_the_encoder_inside: {"ema_per_micro_batch"},
    target_of_everything_inside: {"ema_per_micro_batch"},
    cleared_before_the_last: {"gradients_cleared_in_window"},
    head_cleared_between: {"gradients_cleared_in_window"},
    reloaded_without_gradients: {"resume_in_window"},
    reloaded_in_place_without_gradients: {"resume_in_window"},
    clears_in_its_step_not_divided: {"loss_not_divided"},
}
AT_EVERY_N: dict[Callable[..., Any], set[str]] = {  # seen beside `cleared_after_the_step` only
    cleared_before_the_step: {"gradients_cleared_in_window"},
    cleared_after_each: {"gradients_cleared_in_window"},
    head_cleared_before_the_step: {"gradients_cleared_in_window"},
}
