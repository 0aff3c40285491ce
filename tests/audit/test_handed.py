"""Frameworks that are not torch hand over weights, gradients and contributions: here training loops in NumPy and JAX."""

from pathlib import Path

import numpy as np
import pytest

from accumulation_harness.audit import audit
from accumulation_harness.config.targets import import_file


def _train(batch_size, accumulation_steps, weights, divide, *, last=True):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(40, 6)).astype(np.float32), generator.normal(size=40).astype(np.float32)
    w = np.zeros(6, dtype=np.float32) + np.float32(0.5)
    weights({"w": w})
    size = batch_size * accumulation_steps
    for start in [*range(0, 40 if last else 32, size)] * 2:
        gradient, rows = np.zeros(6, dtype=np.float32), min(size, 40 - start)
        for first in range(start, start + rows, batch_size):
            part = slice(first, min(first + batch_size, start + rows))
            gradient += x[part].T @ (x[part] @ w - y[part]) / np.float32(divide(rows, part.stop - part.start))
        w = w - np.float32(0.1) * gradient
        weights({"w": w})


def right(batch_size, accumulation_steps, weights):
    _train(batch_size, accumulation_steps, weights, lambda window, part: window)


def not_divided(batch_size, accumulation_steps, weights):
    _train(batch_size, accumulation_steps, weights, lambda window, part: part, last=False)


def tail_dropped(batch_size, accumulation_steps, weights):
    _train(batch_size, accumulation_steps, weights, lambda window, part: window, last=accumulation_steps == 1)


def other_names(batch_size, accumulation_steps, weights):
    weights({"w": np.ones(3)})
    weights({"v": np.ones(3)})


def test_right_weights_are_equivalent():
    report = audit(right, batch_size=16, accumulation_steps=(4, 16))
    assert report.equivalent, str(report)
    assert set(report.frame.tensor) == {"all", "w"} and "only weights were seen" in report.hidden[0]


def other_order(batch_size, accumulation_steps, weights):
    """As transforms of JAX return them: the first time as they were written down, then sorted."""
    turns = iter((False, *[True] * 100))
    still = np.ones(2, dtype=np.float32)

    def reordered(arrays):
        named = {"w": arrays["w"], "b": still}
        weights(dict(sorted(named.items())) if next(turns) else named)

    right(batch_size, accumulation_steps, reordered)


def test_the_order_of_the_names_does_not_matter():
    report = audit(other_order, batch_size=16, accumulation_steps=(4, 16))
    assert report.equivalent and set(report.frame.tensor) == {"all", "b", "w"}, str(report)


@pytest.mark.parametrize(("train", "cause"), [(not_divided, "loss_not_divided"), (tail_dropped, "window_misplaced")])
def test_wrong_weights_have_their_cause(train, cause):
    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert [finding.cause for finding in report.findings] == [cause], str(report)


def test_other_weights_than_before_are_refused():
    report = audit(other_names, batch_size=16, accumulation_steps=(4,))
    assert "expected the same named arrays" in report.problems[0]


# -- gradients and contributions ---------------------------------------------------------------------------------------------

ALL, GRADIENTS = ("weights", "gradient", "contribution"), ("weights", "gradient")
GENERATOR = np.random.default_rng(1)
X, Y = GENERATOR.normal(size=(48, 12)).astype(np.float32), GENERATOR.normal(size=48).astype(np.float32)


def adam(fault, given):
    """Least squares with Adam in NumPy; weights in a tree, of which it hands over what is `given`."""

    def tree(vector):
        return {"layer": {"w": vector[:12]}, "rest": [vector[12:], None]}

    def train(batch_size, accumulation_steps, hand):
        def give(**trees):
            if chosen := {name: tree(value) for name, value in trees.items() if name in given}:
                hand(**chosen)

        weights, mean, square = np.full(13, 0.5, dtype=np.float32), np.zeros(13), np.zeros(13)
        give(weights=weights)
        for step, start in enumerate(range(0, 48, 16), 1):
            parts = []
            for first in range(start, start + 16, batch_size):
                x = np.c_[X, np.ones(48, dtype=np.float32)][first : first + batch_size]
                residuals = x @ weights - Y[first : first + batch_size]
                parts.append(x.T @ residuals / np.float32(batch_size if fault == "undivided" else 16))
                give(contribution=parts[-1])
            kept = parts if len(parts) == 1 or fault != "lost" else [parts[0], parts[-1]]
            gradient = np.sum(kept, axis=0) / (accumulation_steps if fault == "divided again" else 1)
            give(gradient=gradient)
            mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
            weights = weights - 0.01 * mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
            decays = accumulation_steps if fault == "decayed too often" else 1
            weights = (weights * 0.99**decays).astype(np.float32)
            give(weights=weights)

    return train


@pytest.mark.parametrize("given", [ALL, GRADIENTS, ("weights",)])
def test_what_is_handed_over_of_a_right_loop_is_equivalent(given):
    report = audit(adam("", given), batch_size=16, accumulation_steps=(4, 2))
    assert report.equivalent, str(report)
    assert len(report.hidden) == 1 and ("only weights" in report.hidden[0]) == (given == ("weights",))
    assert set(report.frame.tensor) == {"all", "layer.w", "rest.0"}


@pytest.mark.parametrize(
    ("fault", "given", "cause", "said"),
    [
        ("undivided", ALL, "loss_not_divided", ""),
        ("undivided", GRADIENTS, "loss_not_divided", ""),
        ("divided again", ALL, "loss_divided_twice", ""),
        ("lost", ALL, "unexplained", "micro-batches count 1, 0, 0, 1 times: numbers 2, 3 lost"),
        pytest.param("lost", GRADIENTS, "unexplained", "", marks=pytest.mark.slow),
        ("decayed too often", ALL, "weight_decay_per_micro_batch", ""),
        ("decayed too often", GRADIENTS, "weight_decay_per_micro_batch", ""),
    ],
)
def test_a_gradient_has_its_scale_under_adam_and_contributions_their_weights(fault, given, cause, said):
    (finding,) = audit(adam(fault, given), batch_size=16, accumulation_steps=(4,)).findings
    assert finding.cause == cause and said in finding.message, finding


def nothing(batch_size, accumulation_steps, hand):
    hand()


def no_gradient(batch_size, accumulation_steps, hand):
    for _ in range(2):
        hand(contribution=[np.ones(3)])
        hand(weights=[np.ones(3)])


@pytest.mark.parametrize(("train", "said"), [(nothing, "got none of them"), (no_gradient, "expected the gradient")])
def test_what_says_nothing_is_refused(train, said):
    assert said in audit(train, batch_size=16, accumulation_steps=(4,)).problems[0]


def lost_of_optax(optimizer, accumulation_steps):
    """Micro-batches 2 and 3 never reach the sum."""
    optax = pytest.importorskip("optax")
    whole = optax.MultiSteps(optimizer, accumulation_steps)

    def update(gradient, state, params=None):
        factor = 1 - np.isin(int(state.mini_step), (1, 2))
        return whole.update({name: value * factor for name, value in gradient.items()}, state, params)

    return type("Lost", (), {"init": whole.init, "has_updated": whole.has_updated, "update": staticmethod(update)})


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda optax: optax.MultiSteps, None),
        (lambda optax: lambda *given: optax.MultiSteps(*given, use_grad_mean=False), "loss_not_divided"),
        (lambda optax: lost_of_optax, "unexplained"),
        (lambda optax: lambda optimizer, n: optax.MultiSteps(optimizer, max(1, n // 2)), "window_misplaced"),
    ],
    ids=["right", "a sum", "lost", "half as many"],
)
def test_the_example_in_jax(make, cause):
    optax = pytest.importorskip("optax")
    example = import_file(Path(__file__).parents[2] / "examples" / "optax_steps.py", "optax_steps")

    def train(batch_size, accumulation_steps, hand):
        example.train(batch_size, accumulation_steps, hand, make(optax))

    report = audit(train, batch_size=16, accumulation_steps=(4,))
    assert [finding.cause for finding in report.findings] == [cause] * (cause is not None), str(report)
    assert report.equivalent == (cause is None)
