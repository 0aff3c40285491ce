"""Loops that weigh their micro-batches in unusual ways, or change what the backwards have given; most of them wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, Loop, X, Y, ce, full_windows, own_mean, sgd, train

Change = Callable[[list[Tensor]], list[Tensor]]


def _by_part(batch_size: int, accumulation_steps: int, weight: Callable[[int, int], float]) -> None:
    """`weight(place in the window, micro-batches so far)` of each mean loss."""
    model = data.model()
    optimizer = sgd(model)
    seen = 0
    for window in full_windows(batch_size * accumulation_steps):
        for place, ids in enumerate(window.split(batch_size)):
            (own_mean(model, ids, window) * weight(place, seen)).backward()
            seen += 1
        optimizer.step()
        optimizer.zero_grad()


def divided_by_place(batch_size: int, accumulation_steps: int) -> None:
    """`loss / (k + 1)`."""
    _by_part(batch_size, accumulation_steps, lambda place, seen: 1 / (place + 1))


def annealed_by_micro_batch(batch_size: int, accumulation_steps: int) -> None:
    """A weight of the loss that grows with the micro-batches."""
    _by_part(batch_size, accumulation_steps, lambda place, seen: (0.2 + seen / 40) / accumulation_steps)


def running_total(batch_size: int, accumulation_steps: int) -> None:
    """The losses so far are added, and their sum is differentiated each time."""
    model = data.model()
    optimizer = sgd(model)
    for window in full_windows(batch_size * accumulation_steps):
        total = torch.zeros(())
        for ids in window.split(batch_size):
            total = total + own_mean(model, ids, window) / accumulation_steps
            total.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def sum_halved_each_time(batch_size: int, accumulation_steps: int) -> None:
    """The gradients so far are halved after every backward."""
    model = data.model()
    optimizer = sgd(model)
    windows = full_windows
    train(
        batch_size,
        accumulation_steps,
        model,
        own_mean,
        optimizer,
        windows=windows,
        after_backward=lambda: frame.divide_gradients(model, 2),
    )


def _aside(batch_size: int, accumulation_steps: int, change: Change) -> None:
    """Gradients are changed one micro-batch at a time, and added in a buffer of the loop's own."""
    model = data.model()
    optimizer = sgd(model)
    parameters = list(model.parameters())
    for window in full_windows(batch_size * accumulation_steps):
        sums = [torch.zeros_like(p) for p in parameters]
        for ids in window.split(batch_size):
            loss = ce(model(X[ids]), Y[ids], reduction="sum") / len(window)
            for total, part in zip(sums, change(list(torch.autograd.grad(loss, parameters))), strict=True):
                total += part
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total
        optimizer.step()


def _norm(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


def clipped_aside(batch_size: int, accumulation_steps: int) -> None:
    _aside(batch_size, accumulation_steps, lambda gradients: [g * min(1.0, 0.05 / _norm(gradients)) for g in gradients])


def normalised_aside(batch_size: int, accumulation_steps: int) -> None:
    _aside(batch_size, accumulation_steps, lambda gradients: [g / _norm(gradients) for g in gradients])


def clamped_aside(batch_size: int, accumulation_steps: int) -> None:
    _aside(batch_size, accumulation_steps, lambda gradients: [g.clamp(-0.01, 0.01) for g in gradients])


def added_aside(batch_size: int, accumulation_steps: int) -> None:
    """The same buffer with nothing changed: a right loop."""
    _aside(batch_size, accumulation_steps, lambda gradients: gradients)


def clamped_inside(batch_size: int, accumulation_steps: int) -> None:
    """The sum so far is clamped in place, by a line of the loop's own."""
    model = data.model()

    def clamp() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.clamp_(-0.01, 0.01)

    train(batch_size, accumulation_steps, model, after_backward=clamp)


def clipped_by_value_inside(batch_size: int, accumulation_steps: int) -> None:
    model = data.model()
    train(batch_size, accumulation_steps, model, after_backward=lambda: clip_grad_value_(model.parameters(), 0.01))


def changed_before_the_step(batch_size: int, accumulation_steps: int) -> None:
    """One layer's gradient is multiplied by N between the last backward and the step."""
    model = data.model()

    def change() -> None:
        assert model[0].weight.grad is not None
        model[0].weight.grad *= accumulation_steps

    train(batch_size, accumulation_steps, model, before_step=change)


def hardest_half(batch_size: int, accumulation_steps: int) -> None:
    """Only the rows with the largest losses count, half of each micro-batch."""

    def loss(model: Any, ids: Tensor, window: Tensor) -> Tensor:
        each = ce(model(X[ids]), Y[ids], reduction="none")
        return each.topk(max(1, len(ids) // 2)).values.sum() / (len(window) / 2)

    train(batch_size, accumulation_steps, data.model(), loss)


def _trimmed(ids: Tensor) -> Tensor:
    return TOKENS[ids, : int((TOKENS[ids] != 0).sum(1).max())]


def _tokens(
    batch_size: int, accumulation_steps: int, count: Callable[[Tensor, tuple[Tensor, ...]], Callable[[Tensor], float]]
) -> None:
    """`count(window, its micro-batches)` gives what the summed loss of each micro-batch is divided by."""
    model = data.language_model()
    optimizer = sgd(model)
    for window in full_windows(batch_size * accumulation_steps):
        parts = window.split(batch_size)
        by = count(window, parts)
        for ids in parts:
            (data.token_loss(model(TOKENS[ids]), TOKENS[ids]) / by(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()


def padding_counted_by_part(batch_size: int, accumulation_steps: int) -> None:
    """Each micro-batch is averaged over its tokens with their padding, up to its own longest sentence."""
    _tokens(batch_size, accumulation_steps, lambda window, parts: lambda ids: _trimmed(ids)[:, 1:].numel() * accumulation_steps)


def padding_counted_in_window(batch_size: int, accumulation_steps: int) -> None:
    """The window's tokens are counted with the padding of each micro-batch."""
    _tokens(batch_size, accumulation_steps, lambda window, parts: lambda ids: sum(_trimmed(p)[:, 1:].numel() for p in parts))


def count_overwritten(batch_size: int, accumulation_steps: int) -> None:
    """The count of the window's tokens is assigned where it should be added to: it is that of the last micro-batch."""
    _tokens(batch_size, accumulation_steps, lambda window, parts: lambda ids: data.num_targets(TOKENS[parts[-1]]))


SHORT = TOKENS.clone()
SHORT[4:8, 1:] = 0  # four sentences of one token: nothing to predict


def _with_empty_sentences(batch_size: int, accumulation_steps: int, loss: frame.Loss) -> None:
    train(batch_size, accumulation_steps, data.language_model(), loss, windows=full_windows)


def micro_batch_without_terms(batch_size: int, accumulation_steps: int) -> None:
    """A right loop, one micro-batch of which has nothing to predict."""
    _with_empty_sentences(
        batch_size, accumulation_steps, lambda m, ids, w: data.token_loss(m(SHORT[ids]), SHORT[ids]) / data.num_targets(SHORT[w])
    )


def mean_without_terms(batch_size: int, accumulation_steps: int) -> None:
    """Each micro-batch is averaged over its own tokens; one has none, and counts as one all the same."""
    _with_empty_sentences(
        batch_size, accumulation_steps, lambda m, ids, w: data.token_loss(m(SHORT[ids]), SHORT[ids], "mean") / accumulation_steps
    )


def temperature_times_n(batch_size: int, accumulation_steps: int) -> None:
    """Features of the window are cached, each micro-batch's are computed again in their place: the temperature counts N times."""
    torch.manual_seed(0)
    images, texts, scale = nn.Linear(data.FEATURES, 6), nn.Linear(data.FEATURES, 6), nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([*images.parameters(), *texts.parameters(), scale], lr=0.05)
    for window in full_windows(batch_size * accumulation_steps):
        with torch.no_grad():
            cached = images(X[window]), texts(X[window].flip(1))
        for k, ids in enumerate(window.split(batch_size)):
            start, end = k * batch_size, (k + 1) * batch_size
            a = torch.cat([cached[0][:start], images(X[ids]), cached[0][end:]])
            b = torch.cat([cached[1][:start], texts(X[ids].flip(1)), cached[1][end:]])
            scores, pairs = scale * a @ b.T, torch.arange(len(window))
            ((ce(scores, pairs) + ce(scores.T, pairs)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


WRONG: dict[Loop, set[str]] = {
    divided_by_place: {"unexplained"},
    annealed_by_micro_batch: {"unexplained"},
    running_total: {"unexplained"},
    sum_halved_each_time: {"sum_rescaled_in_window"},
    clipped_aside: {"clip_per_micro_batch"},
    normalised_aside: {"clip_per_micro_batch"},
    clamped_aside: {"clip_per_micro_batch"},
    clamped_inside: {"clip_per_micro_batch"},
    clipped_by_value_inside: {"clip_per_micro_batch"},
    changed_before_the_step: {"unexplained"},
    hardest_half: {"non_separable_loss"},
    padding_counted_by_part: {"normaliser_depends_on_split"},
    padding_counted_in_window: {"counter_wrong"},
    count_overwritten: {"counter_wrong"},
    mean_without_terms: {"mean_of_means"},
    temperature_times_n: {"auxiliary_loss_scale"},
}
RIGHT = frame.unlisted(globals(), WRONG)
SAID: dict[Loop, str] = {  # words of the first finding
    divided_by_place: "not by their numbers of loss terms: micro-batches count 4, 2, 1.33, 1 times",
    running_total: "micro-batches count ",
    changed_before_the_step: "changed before the optimizer takes it",
    sum_halved_each_time: "divided by 2 again and again: micro-batches count 0.0625, 0.125, 0.25, 0.5 times",
    mean_without_terms: "1 of them none",
    temperature_times_n: "4 times too large",
}
