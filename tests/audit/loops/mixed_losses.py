"""Loops, right and wrong, with losses of several terms, and with averages that earlier runs left."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, full_windows, train


def _preferences(batch_size: int, accumulation_steps: int, divisor: Callable[[Tensor, Tensor], float]) -> None:
    """Cross-entropy over tokens plus a log-odds term over pairs of rows (as in ORPO), whose rows always come together.

    The token term is the sum over the micro-batch divided by `divisor(ids, window)`.
    """
    rejected = TOKENS.roll(1, 0)

    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        outputs = model(torch.cat([TOKENS[ids], rejected[ids]]))
        chosen = data.token_loss(outputs[: len(ids)], TOKENS[ids]) / divisor(ids, window)
        scores = outputs.logsumexp(2).mean(1)
        odds = -functional.logsigmoid(scores[: len(ids)] - scores[len(ids) :]).sum()
        return chosen + 0.5 * odds / len(window)

    train(batch_size, accumulation_steps, data.language_model(), loss)


def preferences_by_tokens(batch_size: int, accumulation_steps: int) -> None:
    """The token term is divided by the tokens of the window."""
    _preferences(batch_size, accumulation_steps, lambda ids, window: data.num_targets(TOKENS[window]))


def preferences_by_means(batch_size: int, accumulation_steps: int) -> None:
    """The token term is a mean over the micro-batch; the pairs are counted rightly."""
    _preferences(batch_size, accumulation_steps, lambda ids, window: data.num_targets(TOKENS[ids]) * len(window) / len(ids))


def preferences_added(batch_size: int, accumulation_steps: int) -> None:
    """The same, and the token term's means are added."""
    _preferences(batch_size, accumulation_steps, lambda ids, window: data.num_targets(TOKENS[ids]))


class Experts(nn.Module):
    """Experts behind a router: the mixture's outputs, and the router's scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(data.FEATURES, 3)
        self.experts = nn.ModuleList([nn.Linear(data.FEATURES, data.CLASSES) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x)
        mixed = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (scores.softmax(1).unsqueeze(2) * mixed).sum(1), scores


def _routed(batch_size: int, accumulation_steps: int, router_loss: Callable[[Tensor], Tensor]) -> None:
    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        outputs, scores = model(X[ids])
        return ce(outputs, Y[ids]) / accumulation_steps + router_loss(scores)

    train(batch_size, accumulation_steps, Experts(), loss, windows=full_windows)


def router_loss(batch_size: int, accumulation_steps: int) -> None:
    """The router's own loss, a mean over the micro-batch, is not divided."""
    _routed(batch_size, accumulation_steps, lambda scores: 0.1 * scores.logsumexp(1).square().mean())


def _balance(scores: Tensor) -> Tensor:
    """Half the share of rows that each expert gets, which has no gradient, times its mean probability, times 3."""
    load = functional.one_hot(scores.argmax(1), 3).float().mean(0)
    return 0.5 * 3 * (load * scores.softmax(1).mean(0)).sum()


def load_balance_divided(batch_size: int, accumulation_steps: int) -> None:
    """The load of an expert is counted over the micro-batch instead of the window."""
    _routed(batch_size, accumulation_steps, lambda scores: _balance(scores) / accumulation_steps)


def load_balance_in_full(batch_size: int, accumulation_steps: int) -> None:
    """The same, and the load-balancing loss is not divided."""
    _routed(batch_size, accumulation_steps, _balance)


OLD_AVERAGES: list[frame.Average] = []  # of earlier runs; they stay, as in a registry or in reference cycles


def average_beside_old_ones(batch_size: int, accumulation_steps: int) -> None:
    """The average moves after every step."""
    model = data.model()
    OLD_AVERAGES.append(frame.Average(model))
    train(batch_size, accumulation_steps, model, after_step=OLD_AVERAGES[-1].update)


def average_inside_beside_old_ones(batch_size: int, accumulation_steps: int) -> None:
    """The average moves after every micro-batch."""
    model = data.model()
    OLD_AVERAGES.append(frame.Average(model))
    train(batch_size, accumulation_steps, model, after_micro_batch=OLD_AVERAGES[-1].update)


WRONG: dict[frame.Loop, set[str]] = {
    preferences_by_means: {"mean_of_means"},
    preferences_added: {"mean_of_means", "auxiliary_loss_scale"},
    router_loss: {"auxiliary_loss_scale"},
    load_balance_divided: {"non_separable_loss"},
    load_balance_in_full: {"non_separable_loss", "auxiliary_loss_scale"},
    average_inside_beside_old_ones: {"ema_per_micro_batch"},
}

RIGHT = frame.unlisted(globals(), WRONG)
