"""Operations in double precision, rounded once: sums lose their rounding, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from accumulation_harness.audit.observe.wide import RoundedOnce

ULP = 2.0**-23  # relative; one rounding of a sum is at most half of it


def _slopes(dtype: torch.dtype) -> Tensor:
    """By the weight of a linear layer, summed over 32,000 equal positions."""
    weight = torch.full((3, 4), 0.3, dtype=dtype, requires_grad=True)
    functional.linear(torch.full((32_000, 4), 0.7, dtype=dtype), weight).tanh().mean().backward()
    assert weight.grad is not None
    return weight.grad


def _off(slopes: Tensor) -> float:
    exact = _slopes(torch.float64)
    return float((slopes.double() - exact).norm() / exact.norm())


def test_sums_over_many_positions_round_once() -> None:
    as_ever = _off(_slopes(torch.float32))
    with RoundedOnce():
        rounded_once = _slopes(torch.float32)
    assert rounded_once.dtype == torch.float32
    assert _off(rounded_once) <= 4 * ULP < as_ever  # a forward and a backward of two operations each


def _drawn() -> Tensor:
    torch.manual_seed(3)
    return functional.dropout(torch.ones(64), 0.5) + torch.rand(64)


def _written() -> Tensor:
    sums = torch.full((8,), 0.1)
    view = sums[2:5]
    view += 0.2
    return sums


CASES: list[Callable[[], Tensor]] = [
    _drawn,
    _written,
    lambda: torch.full((4,), 0.1).sum(dtype=torch.float64),
    lambda: torch.full((4,), 0.1, dtype=torch.float64) / 3,
    lambda: torch.full((4, 4), 0.1, dtype=torch.bfloat16) @ torch.full((4, 4), 0.3, dtype=torch.bfloat16),
    lambda: torch.arange(5) // 2,
]


@pytest.mark.parametrize("made", CASES)
def test_everything_else_is_as_ever(made: Callable[[], Tensor]) -> None:
    with RoundedOnce():
        seen = made()
    assert torch.equal(seen, made()) and seen.dtype == made().dtype


def test_an_operation_without_a_kernel_is_done_as_ever() -> None:
    with RoundedOnce(), pytest.raises(RuntimeError, match="size"):
        torch.ones(3) + torch.ones(4)
