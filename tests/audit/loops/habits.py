"""Habits of released trainers, each in a few lines, right and wrong: what they do beside the loop must not mislead the audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy as ce

from experiments.trainers import data


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _windows(batch_size: int, accumulation_steps: int) -> Iterator[tuple[Tensor, ...]]:
    for window in data.windows(batch_size * accumulation_steps):
        yield window.split(batch_size)


# -- rows clipped one by one: a first backward for their norms, cleared, and a second one ------------------------------------


def _norms_first(batch_size: int, accumulation_steps: int, *, kept_aside: bool) -> None:
    inputs, labels = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for parts in _windows(batch_size, accumulation_steps):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for ids in parts:
            optimizer.zero_grad()  # what was added so far is in `sums`
            outputs = model(inputs[ids])
            slopes: list[Tensor] = []
            outputs.register_hook(slopes.append)
            losses = ce(outputs, labels[ids], reduction="none")
            losses.sum().backward(retain_graph=True)
            optimizer.zero_grad()
            (losses * (0.5 / slopes[0].norm(dim=1)).clamp(max=1.0)).sum().backward()
            if kept_aside:
                for total, p in zip(sums, model.parameters(), strict=True):
                    total += p.grad if p.grad is not None else 0.0
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = (total if kept_aside else p.grad.clone() if p.grad is not None else total) / sum(map(len, parts))
        optimizer.step()


def norms_first(batch_size: int, accumulation_steps: int) -> None:
    _norms_first(batch_size, accumulation_steps, kept_aside=True)


def norms_first_last_kept(batch_size: int, accumulation_steps: int) -> None:
    """The clearing between the two backwards takes the micro-batches before with it."""
    _norms_first(batch_size, accumulation_steps, kept_aside=False)


# -- hooks that are good for one backward ------------------------------------------------------------------------------------


def _spent(batch_size: int, accumulation_steps: int, divided_by: int) -> None:
    inputs, labels = data.images()
    model = data.model()
    optimizer = _sgd(model)
    held: list[Tensor] = []

    def pop(gradient: Tensor) -> None:
        held.pop()

    def hold(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        held.append(args[0])
        output.register_hook(pop)

    model[0].register_forward_hook(hold)
    for parts in _windows(batch_size, accumulation_steps):
        for ids in parts:
            (ce(model(inputs[ids]), labels[ids], reduction="sum") / (divided_by or sum(map(len, parts)))).backward()
        optimizer.step()
        optimizer.zero_grad()


def hooks_spent(batch_size: int, accumulation_steps: int) -> None:
    _spent(batch_size, accumulation_steps, 0)


def hooks_spent_other_divisor(batch_size: int, accumulation_steps: int) -> None:
    """Divided by 16, and by 13 without accumulation: a factor that nothing in the window explains."""
    _spent(batch_size, accumulation_steps, 13 if accumulation_steps == 1 else 16)


# -- a forward of zeros, for shapes, before the optimizer is made ------------------------------------------------------------


def _dry(batch_size: int, accumulation_steps: int, loss: Callable[[nn.Module, Tensor, int], Tensor]) -> None:
    tokens = data.sentences()
    model = data.language_model()
    model.forward(torch.zeros(1, 4, dtype=torch.long))
    optimizer = _sgd(model)
    for parts in _windows(batch_size, accumulation_steps):
        count = sum(data.num_targets(tokens[ids]) for ids in parts)
        for ids in parts:
            (loss(model, tokens[ids], count) / (1 if loss is _summed else len(parts))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _summed(model: nn.Module, tokens: Tensor, count: int) -> Tensor:
    return data.token_loss(model(tokens), tokens) / count


def _mean(model: nn.Module, tokens: Tensor, count: int) -> Tensor:
    return data.token_loss(model(tokens), tokens, "mean")


def dry_forward(batch_size: int, accumulation_steps: int) -> None:
    _dry(batch_size, accumulation_steps, _summed)


def dry_forward_mean_of_means(batch_size: int, accumulation_steps: int) -> None:
    _dry(batch_size, accumulation_steps, _mean)


# -- vectors made outside of modules, padded to the longest of the micro-batch -----------------------------------------------


def _padded(batch_size: int, accumulation_steps: int, dropped: float) -> None:
    tokens = data.sentences()
    model = data.language_model()
    torch.manual_seed(3)
    optimizer = _sgd(model)
    for parts in _windows(batch_size, accumulation_steps):
        for ids in parts:
            longest = int((tokens[ids] != 0).sum(1).max())
            part = tokens[ids, :longest]
            vectors = functional.embedding(part, model.embedding.weight) * (part != 0)[..., None]
            hidden = _Locked(dropped)(vectors)
            logits = model.head(model.norm(torch.relu(model.hidden(hidden))))
            data.token_loss(logits, part).div(len(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()


class _Locked(nn.Module):
    """Dropout without `torch.nn.functional`: whole vectors, drawn by hand."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(*x.shape[:2], 1).bernoulli_(1 - self.p) / (1 - self.p) if self.p else x


def padded_vectors(batch_size: int, accumulation_steps: int) -> None:
    _padded(batch_size, accumulation_steps, 0.0)


def padded_vectors_dropped(batch_size: int, accumulation_steps: int) -> None:
    _padded(batch_size, accumulation_steps, 0.3)


# -- optimizers: a number among the states; an update that jumps under rounding ----------------------------------------------


class _Counting(torch.optim.SGD):
    """Keeps a count beside the states of its parameters."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index]
        return super().step(closure)


class _Eigen(torch.optim.Optimizer):
    """Signs of the gradient in the eigenvectors of its own covariance, which has many equal eigenvalues of 0."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            gradient = p.grad.reshape(p.shape[0], -1)
            basis = torch.linalg.eigh(gradient @ gradient.T).eigenvectors
            p -= self.param_groups[0]["lr"] * (basis @ (basis.T @ gradient).sign()).reshape(p.shape)


def _optimized(batch_size: int, accumulation_steps: int, made: Callable[[Any], Any], *, divided: bool = True) -> None:
    inputs, labels = data.images()
    model = data.model()
    optimizer = made(model.parameters())
    for parts in _windows(batch_size, accumulation_steps):
        count = sum(map(len, parts)) if divided else batch_size
        for ids in parts:
            (ce(model(inputs[ids]), labels[ids], reduction="sum") / count).backward()
        optimizer.step()
        optimizer.zero_grad()


def count_among_states(batch_size: int, accumulation_steps: int) -> None:
    _optimized(batch_size, accumulation_steps, lambda p: _Counting(p, lr=0.1))


def count_among_states_not_divided(batch_size: int, accumulation_steps: int) -> None:
    _optimized(batch_size, accumulation_steps, lambda p: _Counting(p, lr=0.1), divided=False)


def eigenvectors(batch_size: int, accumulation_steps: int) -> None:
    _optimized(batch_size, accumulation_steps, lambda p: _Eigen(p, lr=0.01))


def eigenvectors_not_divided(batch_size: int, accumulation_steps: int) -> None:
    _optimized(batch_size, accumulation_steps, lambda p: _Eigen(p, lr=0.01), divided=False)


RIGHT = (norms_first, hooks_spent, dry_forward, padded_vectors, count_among_states, eigenvectors)
WRONG: dict[Callable[[int, int], None], set[str]] = {
    norms_first_last_kept: {"gradients_cleared_in_window"},
    hooks_spent_other_divisor: {"unexplained"},
    dry_forward_mean_of_means: {"mean_of_means"},
    padded_vectors_dropped: {"stochastic_layers"},
    count_among_states_not_divided: {"loss_not_divided"},
    eigenvectors_not_divided: {"loss_not_divided"},
}
