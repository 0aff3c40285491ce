"""Loops whose `order_seed` changes more than the order of rows: their permuted run is no measure of rounding."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from scoreboard import data
from tests.audit.loops.frame import Loop, X, Y, ce, sgd

Loss = Callable[[nn.Module, Tensor, Tensor, int], Tensor]  # (model, rows, classes, rows of the window)


def _own_mean(model, x, y, rows):
    return ce(model(x), y)


def _mean_over_window(model, x, y, rows):
    return ce(model(x), y, reduction="sum") / rows


def _train(
    batch_size, accumulation_steps, order_seed, *, loss=_mean_over_window, dropout=0.0, mixup=False, shuffled=False, cleared=False
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(data.FEATURES, 16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, data.CLASSES))
    optimizer = sgd(model)
    torch.manual_seed(100 + order_seed)
    share = torch.rand(data.SAMPLES, 1, generator=torch.Generator().manual_seed(order_seed)) if mixup else 1.0
    rows = share * X + (1 - share) * X.flip(0)
    for _ in range(data.EPOCHS):
        order = torch.randperm(data.SAMPLES, generator=torch.Generator().manual_seed(order_seed if shuffled else 5))
        for window in order.split(batch_size * accumulation_steps):
            for ids in window.split(batch_size):
                if cleared:
                    optimizer.zero_grad()
                loss(model, rows[ids], Y[ids], len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


def dropout_right(batch_size, accumulation_steps, order_seed=0):
    """One layer of dropout, whose draws come in the order of the rows, gives the same masks at every N."""
    _train(batch_size, accumulation_steps, order_seed, dropout=0.3)


def mixup_right(batch_size, accumulation_steps, order_seed=0):
    _train(batch_size, accumulation_steps, order_seed, mixup=True)


def shuffled_right(batch_size, accumulation_steps, order_seed=0):
    _train(batch_size, accumulation_steps, order_seed, shuffled=True)


def dropout_not_divided(batch_size, accumulation_steps, order_seed=0):
    _train(batch_size, accumulation_steps, order_seed, loss=_own_mean, dropout=0.3)


def mixup_not_divided(batch_size, accumulation_steps, order_seed=0):
    _train(batch_size, accumulation_steps, order_seed, loss=_own_mean, mixup=True)


def shuffled_not_divided(batch_size, accumulation_steps, order_seed=0):
    _train(batch_size, accumulation_steps, order_seed, loss=_own_mean, shuffled=True)


def dropout_cleared(batch_size, accumulation_steps, order_seed=0):
    _train(batch_size, accumulation_steps, order_seed, dropout=0.3, cleared=True)


def mixup_cleared(batch_size, accumulation_steps, order_seed=0):
    _train(batch_size, accumulation_steps, order_seed, mixup=True, cleared=True)


def shuffled_cleared(batch_size, accumulation_steps, order_seed=0):
    _train(batch_size, accumulation_steps, order_seed, shuffled=True, cleared=True)


WRONG: dict[Loop, set[str]] = {
    dropout_not_divided: {"loss_not_divided"},
    mixup_not_divided: {"loss_not_divided"},
    shuffled_not_divided: {"loss_not_divided"},
    dropout_cleared: {"gradients_cleared_in_window"},
    mixup_cleared: {"gradients_cleared_in_window"},
    shuffled_cleared: {"gradients_cleared_in_window"},
}
RIGHT: tuple[Loop, ...] = (dropout_right, mixup_right, shuffled_right)
