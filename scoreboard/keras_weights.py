"""keras `fit` on a backend that is not torch (KERAS_BACKEND=tensorflow): the weights are handed over by a callback."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras

from scoreboard import data


class HandOver(keras.callbacks.Callback):
    """Gives the audit the weights after every optimizer step, that is after every N-th batch of the whole run."""

    def __init__(self, weights: Any, every: int) -> None:
        super().__init__()
        self.hand_over, self.every, self.batches = weights, every, 0

    def _give(self) -> None:
        self.hand_over({variable.path: variable.numpy() for variable in self.model.trainable_variables})

    def on_train_begin(self, logs: Any = None) -> None:
        self._give()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.batches % self.every == 0:
            self._give()


def _fit(batch_size: int, accumulation_steps: int, weights: Any, rows: int, scale: float = 1.0) -> None:
    x, y = (part.numpy()[:rows] for part in data.images())
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((data.FEATURES,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4)]
    )
    steps = accumulation_steps if accumulation_steps > 1 else None
    optimizer = keras.optimizers.SGD(0.1 * (scale if steps else 1), gradient_accumulation_steps=steps)
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callbacks = [HandOver(weights, accumulation_steps)]
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)


def sgd_divisible(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """`fit` on the TensorFlow backend, SGD, divisible."""
    _fit(batch_size, accumulation_steps, weights, 32)


def sgd_remainder(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """`fit` on the TensorFlow backend, SGD, a remainder: a window straddles the end of the epoch."""
    _fit(batch_size, accumulation_steps, weights, 40)


def sgd_not_divided(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """As if Keras added and did not average: the rate is N times as large."""
    _fit(batch_size, accumulation_steps, weights, 32, scale=accumulation_steps)
