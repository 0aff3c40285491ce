"""Loops whose `order_seed` changes more than the order of rows: their permuted run is no measure of rounding."""

import torch
from torch import nn

from scoreboard import data
from tests.audit.loops.frame import At, X, Y, ce, sgd

# Loss: (model, rows, classes, rows of the window)


def _own_mean(model, x, y, rows):
    return ce(model(x), y)


def _mean_over_window(model, x, y, rows):
    return ce(model(x), y, reduction="sum") / rows


def _train(
    batch_size, accumulation_steps, order_seed, *, loss=_mean_over_window, dropout=0.0, mixup=False, shuffled=False, cleared=False
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(data.FEATURES, 16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, data.CLASSES))
    at = At(batch_size, accumulation_steps, model, sgd(model))
    torch.manual_seed(100 + order_seed)
    share = torch.rand(data.SAMPLES, 1, generator=torch.Generator().manual_seed(order_seed)) if mixup else 1.0
    rows = share * X + (1 - share) * X.flip(0)
    for _ in range(data.EPOCHS):
        order = torch.randperm(data.SAMPLES, generator=torch.Generator().manual_seed(order_seed if shuffled else 5))
        for window, parts in at.windows(order.split):
            for ids in parts:
                if cleared:
                    at.optimizer.zero_grad()
                loss(model, rows[ids], Y[ids], len(window)).backward()


_KINDS = {"dropout": {"dropout": 0.3}, "mixup": {"mixup": True}, "shuffled": {"shuffled": True}}


def _loops(fault, **options):
    """A loop of each kind: one layer of dropout, whose draws come in the order of the rows; mixed rows; shuffled ones."""
    made = []
    for kind, own in _KINDS.items():

        def trained(batch_size, accumulation_steps, order_seed=0, own=own):
            _train(batch_size, accumulation_steps, order_seed, **own, **options)

        trained.__name__ = trained.__qualname__ = f"{kind}_{fault}"
        made.append(trained)
    return tuple(made)


RIGHT = _loops("right")
WRONG = {
    **{train: {"loss_not_divided"} for train in _loops("not_divided", loss=_own_mean)},
    **{train: {"gradients_cleared_in_window"} for train in _loops("cleared", cleared=True)},
}
