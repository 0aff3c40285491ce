"""A training in JAX with optax's `MultiSteps`: what torch's hooks do not see is handed over.

accumulation-harness audit examples/optax_steps.py:train --batch-size 16 --accumulation-steps 4
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def handing(hand):
    """The first link of the inner optimizer: hands over the gradient that it takes, and leaves it as it is."""

    def update(gradient, state, params=None):
        jax.debug.callback(lambda tree: hand(gradient=tree), gradient, ordered=True)
        return gradient, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def loss(weights, x, y):
    """The mean over the rows."""
    logits = jnp.tanh(x @ weights["hidden"]) @ weights["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train(batch_size, accumulation_steps, hand, make=optax.MultiSteps):
    """Two epochs of 48 rows. `make(optimizer, N)`: the accumulating optimizer."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(48, 6)).astype(np.float32), generator.integers(3, size=48)
    weights = {
        "hidden": jnp.asarray(generator.normal(size=(6, 8)) * 0.3),
        "out": jnp.asarray(generator.normal(size=(8, 3)) * 0.3),
    }
    optimizer = make(optax.chain(handing(hand), optax.adam(1e-2)), accumulation_steps)
    state = optimizer.init(weights)
    weights = hand(weights=weights)
    for start in [*range(0, 48, batch_size)] * 2:
        part = slice(start, start + batch_size)
        gradient = jax.grad(loss)(weights, x[part], y[part])
        hand(contribution=jax.tree.map(lambda g: g / accumulation_steps, gradient))  # what it adds to the mean
        updates, state = optimizer.update(gradient, state, weights)
        weights = optax.apply_updates(weights, updates)
        jax.effects_barrier()
        if optimizer.has_updated(state):
            weights = hand(weights=weights)
