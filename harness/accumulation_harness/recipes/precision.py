"""Floating-point formats: parameters, autocast, and the loss scaler of float16."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch

from accumulation_harness.config import ConfigError, Precision

HALF = {Precision.float16: torch.float16, Precision.bfloat16: torch.bfloat16}


def parameter_dtype(precision: Precision) -> torch.dtype:
    """float64 for float64; float32 otherwise: under autocast the parameters and their gradients stay float32."""
    return torch.float64 if precision == Precision.float64 else torch.float32


def resolution(precision: Precision) -> float:
    """Distance from 1 to the next number, in the format in which a forward computes."""
    return torch.finfo(HALF.get(precision, parameter_dtype(precision))).eps


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The forward pass's context: autocast for the 16-bit formats, nothing for the others."""
    if precision not in HALF:
        return nullcontext()
    return torch.autocast(device.type, dtype=HALF[precision])


def make_scaler(precision: Precision, device: torch.device, loss_scale: float) -> torch.amp.GradScaler:
    """PyTorch's GradScaler, which does nothing unless `precision`, the trial's, is float16."""
    return torch.amp.GradScaler(device.type, init_scale=loss_scale, enabled=precision == Precision.float16)


def power_of_two(loss_scale: float) -> float:
    """The nearest power of two: the loss scale of the float64 arms of a float16 trial.

    They scale too, so that the order of clipping and unscaling shows. GradScaler multiplies by fl32(1 / S), which is 1 / S
    exactly for a power of two; the error of any other, up to 2^-24 relative, is the scaler's and no arm's.
    """
    return 2.0 ** round(math.log2(loss_scale))


def check_available(precision: Precision, device: torch.device) -> None:
    """Raise `ConfigError` when `device` cannot multiply matrices in `precision`."""
    dtype = HALF.get(precision, parameter_dtype(precision))
    try:
        ones = torch.ones(2, 2, device=device, dtype=dtype)
        (ones @ ones).sum().item()
    except RuntimeError as error:
        raise ConfigError("precision", precision, f"a precision that device={device} can compute ({error})") from error
