"""optax `MultiSteps` in a loop of JAX: the weights are handed over after every optimizer step."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

from scoreboard import data


def _weights() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    sizes = {"hidden": (data.FEATURES, 16), "out": (16, data.CLASSES)}
    return {name: jnp.asarray(generator.normal(size=size) * 0.3, jnp.float32) for name, size in sizes.items()}


def _loss(weights: dict[str, Any], x: Any, y: Any) -> Any:
    logits = jnp.tanh(x @ weights["hidden"]) @ weights["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def _train(inner: Any, batch_size: int, accumulation_steps: int, weights: Any, rows: int = 32, **settings: Any) -> None:
    x, y = (part.numpy()[:rows] for part in data.images())
    held = _weights()
    optimizer = optax.MultiSteps(inner, every_k_schedule=accumulation_steps, **settings)
    state = optimizer.init(held)
    weights(held)
    for _ in range(data.EPOCHS):
        for start in range(0, rows, batch_size):
            part = slice(start, start + batch_size)
            updates, state = optimizer.update(jax.grad(_loss)(held, x[part], y[part]), state, held)
            held = optax.apply_updates(held, updates)
            if optimizer.has_updated(state):
                weights(held)


def sgd_divisible(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """`MultiSteps` around SGD, divisible."""
    _train(optax.sgd(0.1), batch_size, accumulation_steps, weights)


def sgd_remainder(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """`MultiSteps` around SGD, a remainder."""
    _train(optax.sgd(0.1), batch_size, accumulation_steps, weights, rows=40)


def clipped_scheduled(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """`MultiSteps` around SGD with the global norm clipped at 0.3 and a linear schedule, divisible."""
    inner = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(optax.linear_schedule(0.1, 0.0, 5)))
    _train(inner, batch_size, accumulation_steps, weights)


def adamw_decay(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """`MultiSteps` around AdamW, weight decay 0.1, divisible."""
    _train(optax.adamw(1e-2, weight_decay=0.1), batch_size, accumulation_steps, weights)


def sgd_added(batch_size: int, accumulation_steps: int, weights: Any) -> None:
    """`MultiSteps(use_grad_mean=False)` around SGD with mean losses, divisible."""
    _train(optax.sgd(0.1), batch_size, accumulation_steps, weights, use_grad_mean=False)
