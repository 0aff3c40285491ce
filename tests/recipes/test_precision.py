"""Formats of parameters and products, and the scaler that only float16 has."""

from __future__ import annotations

import pytest
import torch

from harness.config import ConfigError, Precision
from harness.recipes.precision import autocast, check_available, make_scaler, parameter_dtype
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


def test_a_format_that_the_device_cannot_compute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in Precision:
        check_available(precision, CPU)

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(torch, "ones", refuse)
    with pytest.raises(ConfigError, match=r"precision=bfloat16: expected a precision that device=cpu can compute \(no kernel\)"):
        check_available(Precision.bfloat16, CPU)
