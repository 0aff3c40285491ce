"""Loops written without a look at the audit, right and wrong, beside each other: those that it had judged or named wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, full_windows, mean_over_window, sgd, train


class _Hybrid(torch.optim.Optimizer):
    """Matrices take plain steps of its own; an inner AdamW steps the vectors."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        super().__init__(parameters, {"lr": 0.05})
        self.matrices = [p for p in parameters if p.ndim > 1]
        self.inner = torch.optim.AdamW([p for p in parameters if p.ndim == 1], lr=1e-2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.matrices:
            assert p.grad is not None
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
        self.inner.step()


def _with_penalty(batch_size: int, accumulation_steps: int, divisor: int) -> None:
    model = data.model()

    def loss(model: Any, ids: Tensor, window: Tensor) -> Tensor:
        penalty = 0.1 * model[0].weight.square().sum() * len(ids) / len(window)
        return mean_over_window(model, ids, window) + penalty * divisor

    train(batch_size, accumulation_steps, model, loss, _Hybrid(model))


def two_kinds_of_steps(batch_size: int, accumulation_steps: int) -> None:
    """An optimizer steps the matrices, and one inside it the vectors; the matrices' penalty is shared out."""
    _with_penalty(batch_size, accumulation_steps, 1)


def two_kinds_of_steps_penalty(batch_size: int, accumulation_steps: int) -> None:
    """Every micro-batch has the whole penalty on a matrix, which the inner optimizer does not hold."""
    _with_penalty(batch_size, accumulation_steps, accumulation_steps)


def _decayed(batch_size: int, accumulation_steps: int, times: int) -> None:
    """Adam, with room for rounding to grow."""
    model = data.model()

    def shrink() -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_((1 - 1e-3) ** times)

    train(batch_size, accumulation_steps, model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), before_step=shrink)


def decayed_before_the_step(batch_size: int, accumulation_steps: int) -> None:
    """Weights are decayed by hand between the last backward and the step."""
    _decayed(batch_size, accumulation_steps, 1)


def decayed_before_the_step_n_times(batch_size: int, accumulation_steps: int) -> None:
    """They are decayed there in one go, once for every micro-batch."""
    _decayed(batch_size, accumulation_steps, accumulation_steps)


def _penalty_first(batch_size: int, accumulation_steps: int, *, shared: bool) -> None:
    def loss(model: Any, ids: Tensor, window: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters() if p.ndim > 1)
        return 1e-2 * penalty * (len(ids) / len(window) if shared else 1.0) + mean_over_window(model, ids, window)

    train(batch_size, accumulation_steps, data.model(), loss)


def penalty_before_the_forward(batch_size: int, accumulation_steps: int) -> None:
    """The graph of the penalty is there before any forward."""
    _penalty_first(batch_size, accumulation_steps, shared=True)


def penalty_before_the_forward_in_full(batch_size: int, accumulation_steps: int) -> None:
    """Every micro-batch has the whole of it."""
    _penalty_first(batch_size, accumulation_steps, shared=False)


def _one_backward(batch_size: int, accumulation_steps: int, *, own_count: bool) -> None:
    model = data.language_model()
    optimizer = sgd(model)
    for window in full_windows(batch_size * accumulation_steps):
        parts, tokens = window.split(batch_size), data.num_targets(TOKENS[window])
        counts = [data.num_targets(TOKENS[ids]) * accumulation_steps if own_count else tokens for ids in parts]
        losses = [data.token_loss(model(TOKENS[ids]), TOKENS[ids]) / n for ids, n in zip(parts, counts, strict=True)]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def one_backward_for_all(batch_size: int, accumulation_steps: int) -> None:
    """The losses of the micro-batches are added, and differentiated together."""
    _one_backward(batch_size, accumulation_steps, own_count=False)


def one_backward_of_means(batch_size: int, accumulation_steps: int) -> None:
    """Each of them is a mean over the tokens of its micro-batch."""
    _one_backward(batch_size, accumulation_steps, own_count=True)


def _cleared_by_hand(batch_size: int, accumulation_steps: int, *, whole: bool) -> None:
    model = data.model()

    def clear() -> None:
        model[0].zero_grad()
        if whole or accumulation_steps == 1:
            model[2].zero_grad()

    train(batch_size, accumulation_steps, model, optimizer=sgd(model, lr=0.05), clear=clear)


def cleared_layer_by_layer(batch_size: int, accumulation_steps: int) -> None:
    """The layers' gradients are cleared one layer after the other."""
    _cleared_by_hand(batch_size, accumulation_steps, whole=True)


def one_layer_never_cleared(batch_size: int, accumulation_steps: int) -> None:
    """With accumulation, only those of the first layer are."""
    _cleared_by_hand(batch_size, accumulation_steps, whole=False)


def _clipped_to_norm(gradients: list[Tensor], limit: float) -> list[Tensor]:
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return [gradient * (limit / (norm + 1e-6)).clamp(max=1) for gradient in gradients]


def _mean_by_hand(batch_size: int, accumulation_steps: int, *, each: bool) -> None:
    model = data.model()
    parameters = list(model.parameters())
    optimizer = sgd(model, lr=0.2)
    for window in data.windows(batch_size * accumulation_steps):
        total = [torch.zeros_like(p) for p in parameters]
        for ids in window.split(batch_size):
            mean = list(torch.autograd.grad(frame.own_mean(model, ids, window), parameters))
            mean = _clipped_to_norm(mean, 0.1) if each else mean
            total = [a + b * len(ids) / len(window) for a, b in zip(total, mean, strict=True)]
        for p, gradient in zip(parameters, total if each else _clipped_to_norm(total, 0.1), strict=True):
            p.grad = gradient
        optimizer.step()


def mean_clipped_by_hand(batch_size: int, accumulation_steps: int) -> None:
    """A mean of the micro-batches' mean gradients is clipped by hand."""
    _mean_by_hand(batch_size, accumulation_steps, each=False)


def each_clipped_by_hand(batch_size: int, accumulation_steps: int) -> None:
    """Each of them is, before the mean is taken."""
    _mean_by_hand(batch_size, accumulation_steps, each=True)


def _copy_in_use(batch_size: int, accumulation_steps: int, *, renewed_at: int) -> None:
    """A copy of the first layer's weight is used outside of any module, and passes its gradient on."""
    model = data.model()
    optimizer = sgd(model, lr=0.3)
    first, copy = model[0], model[0].weight.detach().clone()
    for window in data.windows(batch_size * accumulation_steps):
        for place, ids in enumerate(window.split(batch_size)):
            if place == renewed_at:
                copy = first.weight.detach().clone()
            weight = first.weight + (copy - first.weight).detach()
            hidden = functional.linear(X[ids], weight, first.bias)
            (ce(model[2](torch.tanh(hidden)), Y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def copy_renewed(batch_size: int, accumulation_steps: int) -> None:
    """The copy is renewed before the first micro-batch of a window."""
    _copy_in_use(batch_size, accumulation_steps, renewed_at=0)


def copy_renewed_too_late(batch_size: int, accumulation_steps: int) -> None:
    """It is renewed before the last one."""
    _copy_in_use(batch_size, accumulation_steps, renewed_at=accumulation_steps - 1)


class _Recurrent(nn.Module):
    """Two recurrent layers, with dropout between them in the same operation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(data.VOCABULARY, 8)
        self.layers = nn.GRU(8, 12, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, data.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(tokens))[0])
        return logits


def _six_windows(size: int) -> Iterator[Tensor]:
    return data.windows(size, epochs=3, keep=False)


def recurrent_at_rest(batch_size: int, accumulation_steps: int) -> None:
    """Dropout between recurrent layers is off."""
    model = _Recurrent().eval()
    train(batch_size, accumulation_steps, model, frame.token_mean_over_window, sgd(model), windows=_six_windows)


def recurrent_dropout_of_means(batch_size: int, accumulation_steps: int) -> None:
    """It is on, and each micro-batch is averaged over its own tokens, in more windows than are kept."""
    model = _Recurrent()
    loss = frame.divided(frame.own_token_mean, accumulation_steps)
    train(batch_size, accumulation_steps, model, loss, sgd(model), windows=_six_windows)


def _shortened(batch_size: int, accumulation_steps: int, loss: Any) -> None:
    """Gradients that are longer than 0.9 are shortened by hand before the step, as engines with a clip of their own do."""
    model = data.language_model()
    optimizer = sgd(model)

    def shorten() -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in grads]).norm())
        for g in grads:
            g.mul_(min(1.0, 0.9 / norm))

    train(batch_size, accumulation_steps, model, loss, optimizer, before_step=shorten)


def shortened_by_hand(batch_size: int, accumulation_steps: int) -> None:
    """Divided by the window's tokens."""
    _shortened(batch_size, accumulation_steps, frame.token_mean_over_window)


def shortened_by_hand_of_means(batch_size: int, accumulation_steps: int) -> None:
    """Each micro-batch is averaged over its own tokens, which makes some gradients longer than the limit."""
    _shortened(batch_size, accumulation_steps, frame.divided(frame.own_token_mean, accumulation_steps))


class _Prepares(torch.optim.Optimizer):
    """Its first step moves nothing, and later ones feel every rounding, as those in a basis of eigenvectors do (SOAP)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if self.state[p]:
                p.sub_(self.param_groups[0]["lr"] * p.grad * (1 + (1e9 * p.grad).sin()))
            self.state[p]["is_ready"] = torch.ones(())


def _prepared(batch_size: int, accumulation_steps: int, loss: Any) -> None:
    model = data.language_model()
    train(batch_size, accumulation_steps, model, loss, _Prepares(model))


def prepares_before_it_moves(batch_size: int, accumulation_steps: int) -> None:
    """Divided by the window's tokens."""
    _prepared(batch_size, accumulation_steps, frame.token_mean_over_window)


def prepares_before_it_moves_of_means(batch_size: int, accumulation_steps: int) -> None:
    """Each micro-batch is averaged over its own tokens."""
    _prepared(batch_size, accumulation_steps, frame.divided(frame.own_token_mean, accumulation_steps))


WRONG: dict[frame.Loop, set[str]] = {
    two_kinds_of_steps_penalty: {"auxiliary_loss_scale"},
    decayed_before_the_step_n_times: {"weight_decay_per_micro_batch"},
    penalty_before_the_forward_in_full: {"auxiliary_loss_scale"},
    one_backward_of_means: {"mean_of_means"},
    one_layer_never_cleared: {"gradients_not_cleared"},
    each_clipped_by_hand: {"clip_per_micro_batch"},
    copy_renewed_too_late: {"cached_weights_stale"},
    prepares_before_it_moves_of_means: {"mean_of_means", "short_window_divided_by_n"},
    shortened_by_hand_of_means: {"mean_of_means", "short_window_divided_by_n"},
    recurrent_dropout_of_means: {"mean_of_means", "stochastic_layers"},
}
RIGHT = frame.unlisted(globals(), WRONG)
