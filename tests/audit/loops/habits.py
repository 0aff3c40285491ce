"""Habits of released trainers, each in a few lines, right and wrong: what they do beside the loop must not mislead the audit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, sgd, train


def _over(count: int) -> frame.Loss:
    """The sum over the micro-batch's rows divided by a number that no window changes."""
    return lambda model, ids, window: ce(model(X[ids]), Y[ids], reduction="sum") / count


def _norms_first(batch_size: int, accumulation_steps: int, *, kept_aside: bool) -> None:
    """Rows are clipped one by one: a first backward for their norms, which is cleared, and a second one."""
    model = data.model()
    optimizer = sgd(model, momentum=0.9)
    for window in data.windows(batch_size * accumulation_steps):
        buffer = frame.Buffer(model)
        for ids in window.split(batch_size):
            optimizer.zero_grad()  # what was added so far is in `buffer`
            outputs = model(X[ids])
            slopes: list[Tensor] = []
            outputs.register_hook(slopes.append)
            losses = ce(outputs, Y[ids], reduction="none")
            losses.sum().backward(retain_graph=True)
            optimizer.zero_grad()
            (losses * (0.5 / slopes[0].norm(dim=1)).clamp(max=1.0)).sum().backward()
            buffer.add()
        if kept_aside:
            buffer.hand_over()
        frame.divide_gradients(model, len(window))
        optimizer.step()


def norms_first(batch_size: int, accumulation_steps: int) -> None:
    """The gradients of the micro-batches before are kept aside while `.grad` is cleared between the two backwards."""
    _norms_first(batch_size, accumulation_steps, kept_aside=True)


def norms_first_last_kept(batch_size: int, accumulation_steps: int) -> None:
    """The clearing between the two backwards takes the micro-batches before with it."""
    _norms_first(batch_size, accumulation_steps, kept_aside=False)


def _with_hooks_spent() -> nn.Module:
    """A model whose first layer holds its input until one backward has passed, and fails at a second one."""
    model = data.model()
    held: list[Tensor] = []

    def pop(gradient: Tensor) -> None:
        held.pop()

    def hold(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        held.append(args[0])
        output.register_hook(pop)

    model[0].register_forward_hook(hold)
    return model


def hooks_spent(batch_size: int, accumulation_steps: int) -> None:
    """Hooks in the model are good for one backward: a second one through the same graph raises."""
    model = _with_hooks_spent()
    train(batch_size, accumulation_steps, model, optimizer=sgd(model, momentum=0.9))


def hooks_spent_other_divisor(batch_size: int, accumulation_steps: int) -> None:
    """The sum is divided by 16, and by 13 without accumulation: a factor that nothing in the window explains."""
    model = _with_hooks_spent()
    train(batch_size, accumulation_steps, model, _over(13 if accumulation_steps == 1 else 16), sgd(model, momentum=0.9))


def _dry(batch_size: int, accumulation_steps: int, loss: frame.Loss) -> None:
    model = data.language_model()
    model.forward(torch.zeros(1, 4, dtype=torch.long))
    train(batch_size, accumulation_steps, model, loss, sgd(model, momentum=0.9))


def dry_forward(batch_size: int, accumulation_steps: int) -> None:
    """A forward of zeros, for shapes, runs before the optimizer is made: it is of no window."""
    _dry(batch_size, accumulation_steps, frame.token_mean_over_window)


def dry_forward_mean_of_means(batch_size: int, accumulation_steps: int) -> None:
    """The same, with each micro-batch averaged over its own tokens."""
    _dry(batch_size, accumulation_steps, lambda m, ids, window: frame.own_token_mean(m, ids, window) * len(ids) / len(window))


def _padded(batch_size: int, accumulation_steps: int, dropped: float) -> None:
    def loss(model: Any, ids: Tensor, window: Tensor) -> Tensor:
        part = TOKENS[ids, : int((TOKENS[ids] != 0).sum(1).max())]
        vectors = functional.embedding(part, model.embedding.weight) * (part != 0)[..., None]
        logits = model.head(model.norm(torch.relu(model.hidden(_Locked(dropped)(vectors)))))
        return data.token_loss(logits, part) / len(TOKENS)

    model = data.language_model()
    torch.manual_seed(3)
    train(batch_size, accumulation_steps, model, loss, sgd(model, momentum=0.9))


class _Locked(nn.Module):
    """Dropout without `torch.nn.functional`: whole vectors, drawn by hand."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(*x.shape[:2], 1).bernoulli_(1 - self.p) / (1 - self.p) if self.p else x


def padded_vectors(batch_size: int, accumulation_steps: int) -> None:
    """The model is given vectors that no module made, of rows padded to the longest of the micro-batch."""
    _padded(batch_size, accumulation_steps, 0.0)


def padded_vectors_dropped(batch_size: int, accumulation_steps: int) -> None:
    """The same, with dropout by hand."""
    _padded(batch_size, accumulation_steps, 0.3)


class _Counting(torch.optim.SGD):
    """SGD that keeps a count beside the states of its parameters."""

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


def count_among_states(batch_size: int, accumulation_steps: int) -> None:
    """The optimizer keeps a number among its states, which is no state of a parameter."""
    model = data.model()
    train(batch_size, accumulation_steps, model, optimizer=_Counting(model.parameters(), lr=0.1))


def count_among_states_not_divided(batch_size: int, accumulation_steps: int) -> None:
    """The same, with the sum divided by the rows of the micro-batch."""
    model = data.model()
    train(batch_size, accumulation_steps, model, _over(batch_size), _Counting(model.parameters(), lr=0.1))


def eigenvectors(batch_size: int, accumulation_steps: int) -> None:
    """The update jumps under rounding, although the gradients agree."""
    model = data.model()
    train(batch_size, accumulation_steps, model, optimizer=_Eigen(model.parameters(), lr=0.01))


def eigenvectors_not_divided(batch_size: int, accumulation_steps: int) -> None:
    """The same, with the sum divided by the rows of the micro-batch."""
    model = data.model()
    train(batch_size, accumulation_steps, model, _over(batch_size), _Eigen(model.parameters(), lr=0.01))


WRONG: dict[frame.Loop, set[str]] = {
    norms_first_last_kept: {"gradients_cleared_in_window"},
    hooks_spent_other_divisor: {"counter_wrong"},
    dry_forward_mean_of_means: {"mean_of_means"},
    padded_vectors_dropped: {"stochastic_layers"},
    count_among_states_not_divided: {"loss_not_divided"},
    eigenvectors_not_divided: {"loss_not_divided"},
}
RIGHT = frame.unlisted(globals(), WRONG)
