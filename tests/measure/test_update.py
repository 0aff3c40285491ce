"""What state an optimizer and a moving average can have been led into, from their definitions."""

from __future__ import annotations

import pytest
import torch

from accumulation_harness.measure.update import averages, partial_gradients
from accumulation_harness.referee.oracle import Parts


def test_averages_that_moved_for_every_micro_batch() -> None:
    before, start, reached = (torch.tensor([value], dtype=torch.float64) for value in (0.0, 1.0, 2.0))
    right, *wrong = (float(mean) for mean in averages(before, start, reached, 0.5, 3))
    assert right == 1.0  # half of 2
    assert wrong == [0.875, 1.375, 1.4375, 1.75]  # three early; two early, one late; three early, one late; three late
    first = [float(mean) for mean in averages(None, start, reached, 0.5, 3)]
    assert first == [2.0, 1.0, 1.5, 1.5, 2.0]  # the first weights are taken as they are
    assert [float(mean) for mean in averages(before, start, reached, 0.5, 1)] == [1.0], "one micro-batch cannot show it"


def test_partial_gradients_leave_out_the_last() -> None:
    one, two, three = (torch.tensor([value], dtype=torch.float64) for value in (1.0, 4.0, 2.0))
    found = [[float(g) for g in first] for first in partial_gradients(Parts((one, two, three), (1, 1, 2)))]
    assert found == [[0.25, 1.0], [0.25, 1.25], [1.0, 4.0], pytest.approx([1.0, 5.0])]
    assert not list(partial_gradients(None))
