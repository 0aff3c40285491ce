"""TensorFlow by hand, as texts show it: gradients of a `GradientTape` are added up and applied after every N batches."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf

from scoreboard import data

EPOCHS = 2


def _train(batch_size: int, accumulation_steps: int, weights: Any, *, rows: int, divided: bool, last: bool) -> None:
    """`divided`: each micro-batch's mean loss is divided by N; `last`: the epoch's remainder is applied and not carried over."""
    x, y = (part.numpy()[:rows] for part in data.images())
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((data.FEATURES,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(data.CLASSES)]
    )
    optimizer = keras.optimizers.SGD(0.1)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sums = [tf.Variable(tf.zeros_like(variable)) for variable in model.trainable_variables]

    def give() -> None:
        weights({variable.path: variable.numpy() for variable in model.trainable_variables})

    def apply() -> None:
        optimizer.apply_gradients(zip([tf.convert_to_tensor(one) for one in sums], model.trainable_variables, strict=True))
        for one in sums:
            one.assign(tf.zeros_like(one))
        give()

    give()
    position = 0
    for _ in range(EPOCHS):
        starts = list(range(0, rows, batch_size))
        for start in starts:
            with tf.GradientTape() as tape:
                loss = loss_of(y[start : start + batch_size], model(x[start : start + batch_size], training=True))
                loss = loss / accumulation_steps if divided else loss
            for one, gradient in zip(sums, tape.gradient(loss, model.trainable_variables), strict=True):
                one.assign_add(gradient)
            position += 1
            if position == accumulation_steps or (last and start == starts[-1]):
                apply()
                position = 0


def divided(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """A loop by hand on TensorFlow, mean losses divided by N, divisible."""
    _train(batch_size, accumulation_steps, weights, rows=32, divided=True, last=False)


def undivided(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """A loop by hand on TensorFlow, mean losses added, divisible."""
    _train(batch_size, accumulation_steps, weights, rows=32, divided=False, last=False)


def divided_remainder(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """A loop by hand on TensorFlow, mean losses divided by N; the remainder of an epoch is carried into the next."""
    _train(batch_size, accumulation_steps, weights, rows=40, divided=True, last=False)


def divided_remainder_applied(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """A loop by hand on TensorFlow, mean losses divided by N; the remainder of an epoch is applied at its end."""
    _train(batch_size, accumulation_steps, weights, rows=40, divided=True, last=True)
