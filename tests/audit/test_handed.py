"""Frameworks that are not torch hand over their weights: here a training loop in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from accumulation_harness.audit import audit

Hand = Callable[[Mapping[str, Any]], None]
Divide = Callable[[int, int], float]


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
    assert "expected the same named weights" in report.problems[0]
