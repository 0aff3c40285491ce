"""keras `fit` with `gradient_accumulation_steps` on the torch backend, whose optimizers are keras' own."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np

from scoreboard import data


def _fit(optimizer: Any, batch_size: int, rows: int = 32) -> list[float]:
    x, y = (part.numpy()[:rows] for part in data.images())
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(data.CLASSES)])
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(np.asarray(x), np.asarray(y), batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return []


def _steps(accumulation_steps: int) -> int | None:
    return accumulation_steps if accumulation_steps > 1 else None


def sgd_divisible(batch_size: int, accumulation_steps: int) -> None:
    """`fit` on the torch backend, SGD, divisible."""
    _fit(keras.optimizers.SGD(0.1, gradient_accumulation_steps=_steps(accumulation_steps)), batch_size)


def sgd_remainder(batch_size: int, accumulation_steps: int) -> None:
    """`fit` on the torch backend, SGD, a remainder: a window straddles the end of the epoch."""
    _fit(keras.optimizers.SGD(0.1, gradient_accumulation_steps=_steps(accumulation_steps)), batch_size, rows=40)


def adamw_decay(batch_size: int, accumulation_steps: int) -> None:
    """`fit` on the torch backend, AdamW, weight decay 0.1, divisible."""
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, "gradient_accumulation_steps": _steps(accumulation_steps)}
    _fit(keras.optimizers.AdamW(**settings), batch_size)


def adam_ema(batch_size: int, accumulation_steps: int) -> None:
    """`fit` on the torch backend, Adam with `use_ema=True`, divisible."""
    settings = {"use_ema": True, "ema_momentum": 0.9, "gradient_accumulation_steps": _steps(accumulation_steps)}
    _fit(keras.optimizers.Adam(1e-3, **settings), batch_size)


class ByWindow(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """Another schedule, asked once per window."""

    def __init__(self, schedule: Any, window: int) -> None:
        self.schedule, self.window = schedule, window

    def __call__(self, step: Any) -> Any:
        return self.schedule(step // self.window)


def sgd_scheduled_by_window(batch_size: int, accumulation_steps: int) -> None:
    """`fit` on the torch backend, SGD, the same schedule of the step divided by N and rounded down, divisible."""
    schedule = ByWindow(keras.optimizers.schedules.PolynomialDecay(0.1, decay_steps=4, end_learning_rate=0.0), accumulation_steps)
    _fit(keras.optimizers.SGD(schedule, gradient_accumulation_steps=_steps(accumulation_steps)), batch_size)


def sgd_scheduled(batch_size: int, accumulation_steps: int) -> None:
    """`fit` on the torch backend, SGD, a `LearningRateSchedule` that decays to 0 over the 4 optimizer steps, divisible."""
    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, decay_steps=4, end_learning_rate=0.0)
    _fit(keras.optimizers.SGD(schedule, gradient_accumulation_steps=_steps(accumulation_steps)), batch_size)
