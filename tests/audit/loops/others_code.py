"""Loops in the manner of other people's code, right and wrong, that an attack found misjudged: two faults at once, mostly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import X, Y, ce, full_windows, sgd, train


def _tokens(batch_size: int, accumulation_steps: int, *, of_means: bool = True, model: Any = None, **stages: Any) -> None:
    """`stages` are made from the model and its optimizer."""
    model = model or data.language_model()
    optimizer = sgd(model)
    loss = frame.divided(frame.own_token_mean, accumulation_steps) if of_means else frame.token_mean_over_window
    made = {name: stage(model, optimizer) for name, stage in stages.items()}
    train(batch_size, accumulation_steps, model, loss, optimizer, windows=full_windows, **made)


class _Recomputed(nn.Module):
    """A language model whose hidden part is computed again for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = data.language_model()

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.whole.embedding(tokens)
        inside = nn.Sequential(self.whole.hidden, nn.ReLU(), self.whole.norm)
        logits: Tensor = self.whole.head(checkpoint(inside, embedded, use_reentrant=False))
        return logits


def recomputed(batch_size: int, accumulation_steps: int) -> None:
    """Divided by the window's tokens."""
    _tokens(batch_size, accumulation_steps, of_means=False, model=_Recomputed())


def recomputed_of_means(batch_size: int, accumulation_steps: int) -> None:
    """Each micro-batch is averaged over its own tokens."""
    _tokens(batch_size, accumulation_steps, model=_Recomputed())


def cleared_of_means(batch_size: int, accumulation_steps: int) -> None:
    """The same, and gradients are cleared before every backward."""
    _tokens(batch_size, accumulation_steps, before_backward=lambda model, optimizer: optimizer.zero_grad)


def clipped_inside_of_means(batch_size: int, accumulation_steps: int) -> None:
    """The same, and clipped after every backward."""
    _tokens(batch_size, accumulation_steps, after_backward=lambda model, optimizer: frame.clip(model, 0.2))


def assigned_of_means(batch_size: int, accumulation_steps: int) -> None:
    """The same, and every micro-batch's gradients are put in the place of those before."""
    model = data.language_model()
    parameters, optimizer = list(model.parameters()), sgd(model)
    for window in full_windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            loss = frame.own_token_mean(model, ids, window) / accumulation_steps
            for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = gradient
        optimizer.step()


def two_dropouts_cleared(batch_size: int, accumulation_steps: int) -> None:
    """Two layers of dropout, whose masks are others at every N, and gradients are cleared before every backward."""
    torch.manual_seed(0)
    drop = nn.Dropout(0.3)
    model = nn.Sequential(nn.Linear(data.FEATURES, 16), drop, nn.Tanh(), nn.Linear(16, 12), drop, nn.Linear(12, data.CLASSES))
    optimizer = sgd(model)
    train(batch_size, accumulation_steps, model, optimizer=optimizer, before_backward=optimizer.zero_grad, windows=full_windows)


def _of_the_labelled(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
    """Return the mean over the rows of the first two classes, which alone have labels; 0 where none has."""
    labels = Y[ids].where(Y[ids] < 2, -100)
    return ce(model(X[ids]), labels, reduction="sum") / (labels >= 0).sum().clamp(min=1)


def labels_missing(batch_size: int, accumulation_steps: int) -> None:
    """Some micro-batches hold fewer labels than others, at N = 16 one or none."""
    train(batch_size, accumulation_steps, data.model(), frame.divided(_of_the_labelled, accumulation_steps), windows=full_windows)


class _Encoder(nn.Module):
    """Mean and logarithm of the variance of a code, and what is decoded from the mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode = nn.Linear(data.FEATURES, 8), nn.Linear(4, data.FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, 1)
        return self.decode(mean), mean, spread


def divergence_annealed(batch_size: int, accumulation_steps: int) -> None:
    """The weight of a divergence rises with every micro-batch."""
    seen = [0]

    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        seen[0] += 1
        decoded, mean, spread = model(X[ids])
        divergence = (mean.square() + spread.exp()).sum() + (-spread).sum()
        return ((decoded - X[ids]).square().sum() + 0.05 * seen[0] * divergence) / len(window)

    train(batch_size, accumulation_steps, _Encoder(), loss, windows=full_windows)


class _KeepsItsState(nn.Module):
    """A recurrent layer that begins where the forward before it ended."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.RNNCell(data.FEATURES, 8), nn.Linear(8, data.CLASSES)
        self.state: Tensor | None = None

    def reset(self) -> None:
        self.state = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x, self.state)
        self.state = hidden.detach()
        logits: Tensor = self.head(hidden)
        return logits


def state_kept_inside(batch_size: int, accumulation_steps: int) -> None:
    """Its state is forgotten after every window, and not after every micro-batch."""
    model = _KeepsItsState()
    train(batch_size, accumulation_steps, model, after_step=model.reset, windows=full_windows)


def state_forgotten(batch_size: int, accumulation_steps: int) -> None:
    """Its state is forgotten after every micro-batch."""
    model = _KeepsItsState()
    train(batch_size, accumulation_steps, model, after_micro_batch=model.reset, windows=full_windows)


def _positions(batch_size: int, accumulation_steps: int, *, own_count: bool) -> None:
    """A thousand equal positions in each row: sums over them round alike every time, and further than moved weights show."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(data.FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))
    rows = X[:, None].expand(-1, 1000, -1)
    ignored = (torch.arange(1000) >= 500 + 10 * torch.arange(data.SAMPLES)[:, None]).long() * -100

    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        total = functional.cross_entropy(model(rows[ids]).flatten(0, 1), ignored[ids].flatten(), reduction="sum")
        counted = [int((ignored[part] == 0).sum()) for part in (ids, window)]
        return total / (counted[0] * accumulation_steps if own_count else counted[1])

    train(batch_size, accumulation_steps, model, loss, windows=full_windows)


def equal_positions(batch_size: int, accumulation_steps: int) -> None:
    """Divided by the window's positions."""
    _positions(batch_size, accumulation_steps, own_count=False)


def equal_positions_of_means(batch_size: int, accumulation_steps: int) -> None:
    """Divided by the micro-batch's own."""
    _positions(batch_size, accumulation_steps, own_count=True)


def _averaged(batch_size: int, accumulation_steps: int, where: str, *, in_one: bool) -> None:
    """An average of the weights: `in_one` vector that is updated, or in a list that is made anew each time."""
    model = data.model()
    kept = (
        [torch.cat([p.detach().flatten() for p in model.parameters()])]
        if in_one
        else [p.detach().clone() for p in model.parameters()]
    )

    @torch.no_grad()
    def update() -> None:
        nonlocal kept
        if in_one:
            kept[0].lerp_(torch.cat([p.flatten() for p in model.parameters()]), 0.1)
        else:
            kept = [0.9 * old + 0.1 * p for old, p in zip(kept, model.parameters(), strict=True)]

    train(batch_size, accumulation_steps, model, **{where: update})


def average_in_one_vector(batch_size: int, accumulation_steps: int) -> None:
    """It moves after every step."""
    _averaged(batch_size, accumulation_steps, "after_step", in_one=True)


def average_in_one_vector_inside(batch_size: int, accumulation_steps: int) -> None:
    """It moves after every micro-batch."""
    _averaged(batch_size, accumulation_steps, "after_micro_batch", in_one=True)


def average_made_anew(batch_size: int, accumulation_steps: int) -> None:
    """It is made after every step."""
    _averaged(batch_size, accumulation_steps, "after_step", in_one=False)


def average_made_anew_inside(batch_size: int, accumulation_steps: int) -> None:
    """It is made after every micro-batch: how often cannot be seen."""
    _averaged(batch_size, accumulation_steps, "after_micro_batch", in_one=False)


WRONG: dict[frame.Loop, set[str]] = {
    recomputed_of_means: {"mean_of_means"},
    cleared_of_means: {"gradients_cleared_in_window", "mean_of_means"},
    clipped_inside_of_means: {"clip_per_micro_batch", "mean_of_means"},
    assigned_of_means: {"accumulator_overwritten", "mean_of_means"},
    two_dropouts_cleared: {"gradients_cleared_in_window", "stochastic_layers"},
    labels_missing: {"mean_of_means"},
    divergence_annealed: {"unexplained"},
    state_kept_inside: {"stateful_forward"},
    equal_positions_of_means: {"mean_of_means"},
    average_in_one_vector_inside: {"ema_per_micro_batch"},
    average_made_anew_inside: {"ema_per_micro_batch"},
}
RIGHT = frame.unlisted(globals(), WRONG)
SAID: dict[frame.Loop, str] = {
    divergence_annealed: "otherwise in term",
    average_made_anew_inside: "an average of the weights is updated per micro-batch: kept[0]",
}
