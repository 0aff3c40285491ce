"""Bytes of a step against what a linear layer and its loss keep, counted by hand."""

from __future__ import annotations

import pytest
import torch

from harness.config import OptimizerConfig, OptimizerName
from harness.measure import memory
from harness.recipes.micro_batch import Even
from harness.recipes.recipe import take_step
from tests.toy import Toy, make_arm


@pytest.mark.parametrize("micro_batch", [24, 12, 5])
def test_bytes_of_a_softmax_regression(micro_batch: int) -> None:
    """Kept for b samples: log-probabilities [b, 3], loss weights [b], one scalar divisor; 8 bytes each."""
    arm = make_arm(Even(micro_batch), optimizer=OptimizerConfig(name=OptimizerName.adam))
    found = memory.of_step(arm, Toy().batch(torch.arange(24)))
    assert (found.parameters, found.gradients, found.state) == (18 * 8, 18 * 8, 2 * 18 * 8)
    assert found.activations >= micro_batch * 3 * 8 and found.peak is None
    assert found.total == found.parameters + found.gradients + found.state + found.activations


def test_activations_grow_with_the_micro_batch_and_nothing_else_does() -> None:
    sizes = [2, 4, 8, 12, 24]
    window = Toy().batch(torch.arange(24))
    taken = [memory.of_step(make_arm(Even(size)), window) for size in sizes]
    static, slope = memory.fit(sizes, [one.total for one in taken])
    assert {(one.parameters, one.gradients, one.state) for one in taken} == {(144, 144, 0)}
    for size, one in zip(sizes, taken, strict=True):
        assert one.total == pytest.approx(static + slope * size, rel=1e-9)
    assert slope > 0 and static >= 288


def test_counting_changes_no_bit() -> None:
    window = Toy().batch(torch.arange(24))
    counted, plain = make_arm(Even(5)), make_arm(Even(5))
    memory.of_step(counted, window)
    take_step(plain, window)
    for a, b in zip(counted.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert counted.recipe == plain.recipe


def test_one_size_has_no_fit() -> None:
    with pytest.raises(ValueError, match="two or more sizes"):
        memory.fit([4, 4], [1, 2])


def test_gradients_and_activations_live_together_from_the_second_micro_batch_on() -> None:
    """Backward of a single micro-batch lets go of what it needed as gradients come; from the second on the sum is there first."""
    alive = {}
    for num in (1, 2, 6):
        arm = make_arm(Even(4))
        window = Toy().batch(torch.arange(4 * num))
        take_step(arm, window)
        found = memory.of_step(arm, window)
        alive[num] = found.alive
        assert max(found.activations, found.gradients) <= found.alive <= found.activations + found.gradients
    assert alive[1] < alive[2] == alive[6]
    assert alive[2] == found.activations + found.gradients
