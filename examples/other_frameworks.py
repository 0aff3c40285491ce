"""Trainings that the hooks of torch do not see, which hand over their arrays: one small network in each framework.

accumulation-harness audit examples/other_frameworks.py:flax_nnx --batch-size 16 --accumulation-steps 4

Each loop takes `fault`, so that a test can plant one: "undivided" adds means of micro-batches, "means" gives each micro-batch the
same weight whatever its number of rows, "lost" leaves the second and third out.
"""

import numpy as np

ROWS, INPUTS, HIDDEN, CLASSES = 48, 6, 8, 3


def data():
    """Rows, labels, which rows count (unequally many in each micro-batch), and starting weights: the same for each framework."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(ROWS, INPUTS)).astype(np.float32), random.integers(CLASSES, size=ROWS)
    shapes = {"hidden": (INPUTS, HIDDEN), "out": (HIDDEN, CLASSES)}
    weights = {name: (random.normal(size=shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}
    return x, y, (random.random(ROWS) < np.tile([0.9, 0.4, 0.6], ROWS // 3)).astype(np.float32), weights


def windows(batch_size, accumulation_steps, counted, fault=""):
    """Windows of micro-batches: their rows, the number that their sum of losses is divided by, and whether they are added."""
    for start in range(0, ROWS, batch_size * accumulation_steps):
        parts = [slice(start + k * batch_size, start + (k + 1) * batch_size) for k in range(accumulation_steps)]
        whole = sum(counted[rows].sum() for rows in parts)
        own = {"undivided": 1, "means": accumulation_steps}
        divisors = [counted[rows].sum() * own[fault] if fault in own else whole for rows in parts]
        kept = [fault != "lost" or accumulation_steps < 3 or k not in (1, 2) for k in range(accumulation_steps)]
        yield list(zip(parts, divisors, kept, strict=True))


def flax_nnx(batch_size, accumulation_steps, hand, fault=""):
    """Modules of Flax; their state is handed over as a nest of dictionaries."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, weights):
            self.hidden, self.out = (nnx.Param(jnp.asarray(w)) for w in weights.values())

        def __call__(self, x):
            return jnp.tanh(x @ self.hidden[...]) @ self.out[...]

    def loss(model, x, y, counted, divisor):
        each = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
        return (each * counted).sum() / divisor

    def go_on():
        state = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(state, hand(weights=nnx.to_pure_dict(state)))
        nnx.update(model, state)

    x, y, counted, weights = data()
    model = Net(weights)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    go_on()
    for window in windows(batch_size, accumulation_steps, counted, fault):
        total = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        for rows, divisor, kept in window:
            gradient = nnx.grad(loss)(model, x[rows], y[rows], counted[rows], divisor)
            hand(contribution=nnx.to_pure_dict(gradient))
            total = jax.tree.map(jnp.add, total, gradient) if kept else total
        hand(gradient=nnx.to_pure_dict(total))
        optimizer.update(model, total)
        go_on()


def mlx(batch_size, accumulation_steps, hand, fault=""):
    """Modules of MLX, whose parameters and gradients are nests of dictionaries already."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx.utils import tree_map

    class Net(nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.hidden, self.out = (mx.array(w) for w in weights.values())

        def __call__(self, x):
            return mx.tanh(x @ self.hidden) @ self.out

    def loss(model, x, y, counted, divisor):
        return (nn.losses.cross_entropy(model(x), y) * counted).sum() / divisor

    x, y, counted, weights = data()
    model, optimizer = Net(weights), optim.Adam(learning_rate=1e-2)
    gradient_of = nn.value_and_grad(model, loss)
    model.update(hand(weights=model.trainable_parameters()))
    for window in windows(batch_size, accumulation_steps, counted, fault):
        total = tree_map(mx.zeros_like, model.trainable_parameters())
        for rows, divisor, kept in window:
            given = (mx.array(each[rows]) for each in (x, y, counted))
            _, gradient = gradient_of(model, *given, float(divisor))
            hand(contribution=gradient)
            total = tree_map(mx.add, total, gradient) if kept else total
        hand(gradient=total)
        optimizer.update(model, total)
        model.update(hand(weights=model.trainable_parameters()))


def tensorflow(batch_size, accumulation_steps, hand, fault=""):
    """Variables of TensorFlow under a `GradientTape`, which take the weights that come back."""
    import tensorflow as tf

    def go_on():
        for name, value in hand(weights={name: v.numpy() for name, v in variables.items()}).items():
            variables[name].assign(value)

    x, y, counted, weights = data()
    variables = {name: tf.Variable(w) for name, w in weights.items()}
    go_on()
    for window in windows(batch_size, accumulation_steps, counted, fault):
        total = {name: tf.zeros_like(v) for name, v in variables.items()}
        for rows, divisor, kept in window:
            with tf.GradientTape() as tape:
                logits = tf.tanh(x[rows] @ variables["hidden"]) @ variables["out"]
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(y[rows], logits)
                loss = tf.reduce_sum(each * counted[rows]) / divisor
            gradient = tape.gradient(loss, variables)
            hand(contribution=gradient)
            total = {name: total[name] + g for name, g in gradient.items()} if kept else total
        hand(gradient=total)
        for name, variable in variables.items():
            variable.assign_sub(0.1 * total[name])
        go_on()


def keras(batch_size, accumulation_steps, hand, fault=""):
    """A model and an optimizer of Keras, on whichever of its backends is in use (KERAS_BACKEND)."""
    import keras

    def numbers(values):
        return [keras.ops.convert_to_numpy(value) for value in values]

    def go_on():
        for variable, value in zip(model.trainable_variables, hand(weights=numbers(model.trainable_variables)), strict=True):
            variable.assign(value)

    def loss(logits, y, counted, divisor):
        each = keras.ops.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return keras.ops.sum(keras.ops.multiply(each, counted)) / divisor

    x, y, counted, weights = data()
    layers = [keras.layers.Dense(HIDDEN, "tanh", use_bias=False), keras.layers.Dense(CLASSES, use_bias=False)]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers])
    model.set_weights([*weights.values()])
    optimizer = keras.optimizers.Adam(1e-2)
    go_on()
    for window in windows(batch_size, accumulation_steps, counted, fault):
        total = [0.0 * value for value in numbers(model.trainable_variables)]
        for rows, divisor, kept in window:
            gradient = numbers(_keras_gradient(model, loss, x[rows], y[rows], counted[rows], divisor))
            hand(contribution=gradient)
            total = [a + g for a, g in zip(total, gradient, strict=True)] if kept else total
        hand(gradient=total)
        optimizer.apply([keras.ops.convert_to_tensor(value) for value in total], model.trainable_variables)
        go_on()


def _keras_gradient(model, loss, x, *others):
    """The gradient of one micro-batch: the one thing that each backend does in its own way."""
    import keras

    variables = model.trainable_variables
    if keras.backend.backend() == "jax":
        import jax

        return jax.grad(lambda values: loss(model.stateless_call(values, [], x)[0], *others))([v.value for v in variables])
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss(model(x), *others)
        return tape.gradient(value, [v.value for v in variables])
    import torch

    return torch.autograd.grad(loss(model(x), *others), [v.value for v in variables])
