"""mlx-lm's `train` with `grad_accumulation_steps`, on a tiny model; what its optimizer is given is handed over.

It shuffles batches in an order that hangs on their number, so that rows are brought in their own order by its `iterate_batches`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import numpy as np
from mlx_lm.tuner import trainer

from scoreboard import data

mx.set_default_device(mx.cpu)
mx.disable_compile()  # what is inside a compiled step cannot be handed over
ROWS, WIDTH = 32, 16


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        mx.random.seed(0)
        self.embedding = nn.Embedding(data.VOCABULARY, WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, data.VOCABULARY)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.head(nn.gelu(self.hidden(self.embedding(tokens))))


class Handed(mlx.optimizers.SGD):  # type: ignore[misc]
    def __init__(self, hand: Callable[..., Any]) -> None:
        super().__init__(learning_rate=0.1)
        self.hand = hand

    def update(self, model: nn.Module, gradients: Any) -> None:
        self.hand(gradient=gradients)
        super().update(model, gradients)
        model.update(self.hand(weights=model.trainable_parameters()))


def _batches(window: int | None) -> Callable[..., Iterator[tuple[mx.array, ...]]]:
    """Rows in their order; with `window` also what the tokens of a window of so many micro-batches are on average."""

    def iterate(dataset: Any, batch_size: int, **_: Any) -> Iterator[tuple[mx.array, ...]]:
        lengths = (dataset != 0).sum(1)
        targets = np.maximum(lengths - 1, 0)
        for _ in range(data.EPOCHS):
            for start in range(0, ROWS, batch_size):
                rows = slice(start, start + batch_size)
                # `default_loss` counts targets from the offset to the length, both included.
                bounds = np.stack([np.zeros_like(targets[rows]), targets[rows]], 1)
                batch = (mx.array(dataset[rows]), mx.array(bounds))
                if window is None:
                    yield batch
                else:
                    first = start - start % (batch_size * window)
                    yield (*batch, mx.array(targets[first : first + batch_size * window].sum() / window))

    return iterate


def _by_window(model: Any, batch: mx.array, lengths: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """`default_loss` with another divisor."""
    loss, tokens = trainer.default_loss(model, batch, lengths)
    return loss * tokens / targets, tokens


def _train(batch_size: int, accumulation_steps: int, hand: Callable[..., Any], *, counted: bool = False) -> None:
    plain = nn.value_and_grad

    def contributing(model: Any, loss: Any) -> Callable[..., Any]:
        differentiated = plain(model, loss)

        def called(*given: Any) -> Any:
            value, gradient = differentiated(*given)
            hand(contribution=gradient)
            return value, gradient

        return called

    model = Model()
    model.update(hand(weights=model.trainable_parameters()))
    steps = data.EPOCHS * ROWS // batch_size
    with tempfile.TemporaryDirectory() as folder:
        arguments = trainer.TrainingArgs(
            batch_size=batch_size, iters=steps, grad_accumulation_steps=accumulation_steps, steps_per_report=steps,
            adapter_file=str(Path(folder) / "adapters.safetensors"),
        )  # fmt: skip
        given = {"loss": _by_window} if counted else {}
        batches = _batches(accumulation_steps if counted else None)
        with mock.patch.object(nn, "value_and_grad", contributing):
            rows = data.sentences()[:ROWS].numpy()
            trainer.train(model, Handed(hand), rows, args=arguments, iterate_batches=batches, **given)


def tokens(batch_size: int, accumulation_steps: int, hand: Callable[..., Any]) -> None:
    """`default_loss`, unequal lengths, divisible."""
    _train(batch_size, accumulation_steps, hand)


def tokens_by_window(batch_size: int, accumulation_steps: int, hand: Callable[..., Any]) -> None:
    """A loss that is divided by the mean number of tokens of the window's micro-batches, unequal lengths, divisible."""
    _train(batch_size, accumulation_steps, hand, counted=True)
