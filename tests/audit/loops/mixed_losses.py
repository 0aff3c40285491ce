"""Hand-written loops, right and wrong: losses of several terms or of pairs of rows, and averages that earlier runs left."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.trainers import data

ce = functional.cross_entropy


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _preferences(batch_size: int, accumulation_steps: int, *, by_tokens: bool, undivided: bool = False) -> None:
    """Cross-entropy over tokens plus a log-odds term over pairs of rows (as in ORPO), whose rows always come together."""
    tokens = data.sentences()
    rejected = tokens.roll(1, 0)
    model = data.language_model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            both = torch.cat([tokens[ids], rejected[ids]])
            outputs = model(both)
            chosen = data.token_loss(outputs[: len(ids)], tokens[ids])
            loss = chosen / data.num_targets(tokens[ids if not by_tokens else window])
            if not by_tokens and not undivided:
                loss = loss * len(ids) / len(window)
            scores = outputs.logsumexp(2).mean(1)
            odds = -functional.logsigmoid(scores[: len(ids)] - scores[len(ids) :]).sum()
            (loss + 0.5 * odds / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def preferences_by_tokens(batch_size: int, accumulation_steps: int) -> None:
    _preferences(batch_size, accumulation_steps, by_tokens=True)


def preferences_by_means(batch_size: int, accumulation_steps: int) -> None:
    """The token term is a mean over the micro-batch; the pairs are counted rightly."""
    _preferences(batch_size, accumulation_steps, by_tokens=False)


def preferences_added(batch_size: int, accumulation_steps: int) -> None:
    """The same, and the token term's means are added."""
    _preferences(batch_size, accumulation_steps, by_tokens=False, undivided=True)


def pairs_normalised_apart(batch_size: int, accumulation_steps: int) -> None:
    """Pairs weighed by advantages that are normalised over the micro-batch: the pairs themselves stay together."""
    x, _ = data.images()
    model = data.model()
    optimizer = _sgd(model)
    returns = torch.randn(data.SAMPLES, generator=torch.Generator().manual_seed(8))
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            advantages = (returns[ids] - returns[ids].mean()) / (returns[ids].std() + 1e-8)
            scores = model(torch.cat([x[ids], -x[ids]])).logsumexp(1)
            margins = functional.logsigmoid(scores[: len(ids)] - scores[len(ids) :])
            (-(margins * advantages).mean() / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(data.FEATURES, 3)
        self.experts = nn.ModuleList([nn.Linear(data.FEATURES, data.CLASSES) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(1)
        return (shares.unsqueeze(2) * torch.stack([expert(x) for expert in self.experts], dim=1)).sum(1), shares


def _balanced(batch_size: int, accumulation_steps: int, *, divided: bool) -> None:
    """Load balancing: the share of rows that each expert gets, which has no gradient, times its mean probability."""
    x, y = data.images()
    model = Experts()
    optimizer = _sgd(model)
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            outputs, shares = model(x[ids])
            load = functional.one_hot(shares.argmax(1), 3).float().mean(0)
            balance = 3 * (load * shares.mean(0)).sum()
            loss = ce(outputs, y[ids]) / accumulation_steps
            (loss + 0.5 * balance / (accumulation_steps if divided else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def load_balance_divided(batch_size: int, accumulation_steps: int) -> None:
    _balanced(batch_size, accumulation_steps, divided=True)


def load_balance_in_full(batch_size: int, accumulation_steps: int) -> None:
    _balanced(batch_size, accumulation_steps, divided=False)


OLD_AVERAGES: list[list[Tensor]] = []


def _averaged(batch_size: int, accumulation_steps: int, *, per_micro_batch: bool) -> None:
    """An average of the weights; those of earlier runs are still there, as in a registry or in reference cycles."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    average = [p.detach().clone() for p in model.parameters()]
    OLD_AVERAGES.append(average)
    for window in data.windows(batch_size * accumulation_steps):
        parts = window.split(batch_size)
        for place, ids in enumerate(parts):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            last = place == len(parts) - 1
            if last:
                optimizer.step()
                optimizer.zero_grad()
            if last or per_micro_batch:
                for kept, p in zip(average, model.parameters(), strict=True):
                    kept.lerp_(p.detach(), 0.1)


def average_beside_old_ones(batch_size: int, accumulation_steps: int) -> None:
    _averaged(batch_size, accumulation_steps, per_micro_batch=False)


def average_inside_beside_old_ones(batch_size: int, accumulation_steps: int) -> None:
    _averaged(batch_size, accumulation_steps, per_micro_batch=True)


RIGHT: tuple[Callable[..., None], ...] = (preferences_by_tokens, average_beside_old_ones)

WRONG: dict[Callable[..., None], set[str]] = {
    preferences_by_means: {"mean_of_means"},
    preferences_added: {"mean_of_means", "auxiliary_loss_scale"},
    pairs_normalised_apart: {"normaliser_depends_on_split"},
    load_balance_divided: {"non_separable_loss"},
    load_balance_in_full: {"non_separable_loss", "auxiliary_loss_scale"},
    average_inside_beside_old_ones: {"ema_per_micro_batch"},
}
