"""Formats of parameters and products, and the scaler that only float16 has."""

from __future__ import annotations

import pytest
import torch

from accumulation_harness.config import Precision
from accumulation_harness.recipes.precision import make_scaler, power_of_two
from tests.toy import CPU


@pytest.mark.parametrize(
    ("loss_scale", "expected"), [(1.0, 1.0), (1000.0, 1024.0), (100.0, 128.0), (4096.0, 4096.0), (3e-8, 2**-25)]
)
def test_the_scale_of_float64_costs_nothing(loss_scale: float, expected: float) -> None:
    """A power of two is multiplied and divided out exactly; 1000 is not, because the scaler's inverse is rounded to float32."""
    gradient = torch.tensor([1.0, 1 / 3], dtype=torch.float64)

    def after(scale: float) -> torch.Tensor:
        parameter = gradient.clone().requires_grad_()
        optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), make_scaler(Precision.float16, CPU, scale)
        scaler.scale((parameter * gradient).sum()).backward()
        scaler.unscale_(optimizer)
        assert parameter.grad is not None
        return parameter.grad

    assert power_of_two(loss_scale) == expected
    assert torch.equal(after(power_of_two(loss_scale)), gradient)
    assert torch.equal(after(loss_scale), gradient) == (loss_scale == expected)
