"""Loops, right and wrong, with losses of several terms, and with averages that earlier runs left."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, full_windows, loop


def _preferences(divisor):
    """Cross-entropy over tokens plus a log-odds term over pairs of rows (as in ORPO), whose rows always come together.

    The token term is the sum over the micro-batch divided by `divisor(ids, window)`.
    """
    rejected = TOKENS.roll(1, 0)

    def loss(model, ids, window):
        outputs = model(torch.cat([TOKENS[ids], rejected[ids]]))
        chosen = data.token_loss(outputs[: len(ids)], TOKENS[ids]) / divisor(ids, window)
        scores = outputs.logsumexp(2).mean(1)
        odds = -functional.logsigmoid(scores[: len(ids)] - scores[len(ids) :]).sum()
        return chosen + 0.5 * odds / len(window)

    return {"loss": loss}


@loop(model=frame.words)
def preferences_by_tokens(at):
    """The token term is divided by the tokens of the window."""
    return _preferences(lambda ids, window: data.num_targets(TOKENS[window]))


@loop("mean_of_means", model=frame.words)
def preferences_by_means(at):
    """The token term is a mean over the micro-batch; the pairs are counted rightly."""
    return _preferences(lambda ids, window: data.num_targets(TOKENS[ids]) * len(window) / len(ids))


@loop("mean_of_means", "auxiliary_loss_scale", model=frame.words)
def preferences_added(at):
    """The same, and the token term's means are added."""
    return _preferences(lambda ids, window: data.num_targets(TOKENS[ids]))


class Experts(nn.Module):
    """Experts behind a router: the mixture's outputs, and the router's scores."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(data.FEATURES, 3)
        self.experts = nn.ModuleList([nn.Linear(data.FEATURES, data.CLASSES) for _ in range(3)])

    def forward(self, x):
        scores = self.router(x)
        mixed = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (scores.softmax(1).unsqueeze(2) * mixed).sum(1), scores


def _routed(at, router_loss):
    def loss(model, ids, window):
        outputs, scores = model(X[ids])
        return ce(outputs, Y[ids]) / at.n + router_loss(scores)

    return {"loss": loss, "windows": full_windows}


@loop("auxiliary_loss_scale", model=Experts)
def router_loss(at):
    """The router's own loss, a mean over the micro-batch, is not divided."""
    return _routed(at, lambda scores: 0.1 * scores.logsumexp(1).square().mean())


def _balance(scores):
    """Half the share of rows that each expert gets, which has no gradient, times its mean probability, times 3."""
    load = functional.one_hot(scores.argmax(1), 3).float().mean(0)
    return 0.5 * 3 * (load * scores.softmax(1).mean(0)).sum()


@loop("non_separable_loss", model=Experts)
def load_balance_divided(at):
    """The load of an expert is counted over the micro-batch instead of the window."""
    return _routed(at, lambda scores: _balance(scores) / at.n)


@loop("non_separable_loss", "auxiliary_loss_scale", model=Experts)
def load_balance_in_full(at):
    """The same, and the load-balancing loss is not divided."""
    return _routed(at, _balance)


OLD_AVERAGES: list[frame.Average] = []  # of earlier runs; they stay, as in a registry or in reference cycles


@loop()
def average_beside_old_ones(at):
    """The average moves after every step."""
    OLD_AVERAGES.append(frame.Average(at.model))
    return {"after_step": OLD_AVERAGES[-1].update}


@loop("ema_per_micro_batch")
def average_inside_beside_old_ones(at):
    """The average moves after every micro-batch."""
    OLD_AVERAGES.append(frame.Average(at.model))
    return {"after_micro_batch": OLD_AVERAGES[-1].update}


RIGHT, WRONG = frame.tables(globals())
