"""Floating-point formats: parameters, autocast, and the loss scaler of float16."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch

from accumulation_harness.config import ConfigError, Precision

HALF = {Precision.float16: torch.float16, Precision.bfloat16: torch.bfloat16}


def parameter_dtype(precision: Precision) -> torch.dtype:
    """Choose the format of parameters and their gradients: under autocast they stay float32.

    Args:
        precision: The precision of the trial.

    Returns:
        float64 for float64; float32 otherwise.
    """
    return torch.float64 if precision == Precision.float64 else torch.float32


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Make the context of the forward pass.

    Args:
        precision: The precision of the trial.
        device: Where the forward runs.

    Returns:
        Autocast for the 16-bit formats; a context that does nothing for the others.
    """
    if precision not in HALF:
        return nullcontext()
    return torch.autocast(device.type, dtype=HALF[precision])


def make_scaler(precision: Precision, device: torch.device, loss_scale: float) -> torch.amp.GradScaler:
    """Make PyTorch's GradScaler, which does nothing unless the trial is in float16.

    Args:
        precision: The precision of the trial, also for its float64 arms, which scale as it does.
        device: Where the arm runs.
        loss_scale: The initial scale.

    Returns:
        The scaler.
    """
    return torch.amp.GradScaler(device.type, init_scale=loss_scale, enabled=precision == Precision.float16)


def power_of_two(loss_scale: float) -> float:
    """Round to the nearest power of two: the loss scale of the float64 arms of a float16 trial.

    They scale too, so that the order of clipping and unscaling shows. GradScaler multiplies by fl32(1 / S), which is 1 / S
    exactly for a power of two; the error of any other, up to 2^-24 relative, is the scaler's and no arm's.

    Args:
        loss_scale: The trial's scale, positive.

    Returns:
        The power of two nearest to it on a logarithmic scale.
    """
    return 2.0 ** round(math.log2(loss_scale))


def check_available(precision: Precision, device: torch.device) -> None:
    """Refuse a precision that the device cannot multiply matrices in.

    Args:
        precision: The setting.
        device: The device of the trial.

    Raises:
        ConfigError: A product of two small matrices fails there.
    """
    dtype = HALF.get(precision, parameter_dtype(precision))
    try:
        ones = torch.ones(2, 2, device=device, dtype=dtype)
        (ones @ ones).sum().item()
    except RuntimeError as error:
        raise ConfigError("precision", precision, f"a precision that device={device} can compute ({error})") from error
