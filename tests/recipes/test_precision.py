"""Formats of parameters and products, and the scaler that only float16 has."""

from __future__ import annotations

import pytest
import torch

from accumulation_harness.config import ConfigError, Precision
from accumulation_harness.recipes.precision import autocast, check_available, make_scaler, parameter_dtype, power_of_two
from tests.toy import CPU

PARAMETERS = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float32, "bfloat16": torch.float32}


@pytest.mark.parametrize("precision", Precision)
def test_formats(precision: Precision) -> None:
    """Parameters never have 16 bits; products have them inside autocast, and theirs outside."""
    weights = torch.ones(2, 2, dtype=parameter_dtype(precision))
    assert weights.dtype == PARAMETERS[precision]
    with autocast(precision, CPU):
        inside = weights @ weights
    assert str(inside.dtype) == f"torch.{precision}" and (weights @ weights).dtype == weights.dtype


@pytest.mark.parametrize("precision", Precision)
def test_only_float16_is_scaled(precision: Precision) -> None:
    scaler = make_scaler(precision, CPU, 1024.0)
    assert scaler.get_scale() == (1024.0 if precision == Precision.float16 else 1.0)


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


def test_a_format_that_the_device_cannot_compute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in Precision:
        check_available(precision, CPU)

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(torch, "ones", refuse)
    with pytest.raises(ConfigError, match=r"precision=bfloat16: expected a precision that device=cpu can compute \(no kernel\)"):
        check_available(Precision.bfloat16, CPU)
