"""The accelerator beside the CPU: whether it can be used and why not, its generator, and its precision of float32 products."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accumulation_harness.system import driver

TF32_ROUNDOFF = 2.0**-11  # ten bits of mantissa, rounded to nearest


def is_available() -> bool:
    """Whether torch can use a CUDA device. A driver that is too old gives False here, and no warning.

    Returns:
        True where `why_unavailable` has nothing to say.
    """
    return why_unavailable() is None


def why_unavailable() -> str | None:
    """Explain why torch can use no CUDA device.

    Returns:
        The reason in one line, with what to do where that is known; None where a device can be used.
    """
    version, visible = torch.version.cuda or torch.version.hip, os.environ.get("CUDA_VISIBLE_DEVICES")
    if version is None:
        return f"torch {torch.__version__} is a build without CUDA (make TORCH_INDEX=https://download.pytorch.org/whl/cu126)"
    available, told = _asked()
    if available:
        return None
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every device"
    if told:
        return told
    if not driver.is_there():
        return "there is no driver (no nvidia-smi, no /dev/nvidiactl)"
    shown = driver.answer()
    reason = f"CUDA_VISIBLE_DEVICES={visible!r} leaves no device" if visible is not None else "the driver shows no device"
    return f"{reason} ({shown.problem or f'nvidia-smi shows {len(shown.cards)}'})"


def _asked() -> tuple[bool, str]:
    """What torch answers, and what it warns of when it does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    return available, " ".join(" ".join(str(one.message).split()) for one in caught)


def module(device: torch.device) -> Any:
    """Look up torch's module of a kind of device: `torch.cuda` for CUDA. Never ask it of a CPU, which has none.

    Args:
        device: A device that is no CPU.

    Returns:
        The module, with `mem_get_info`, `manual_seed`, `synchronize` and the like.
    """
    return torch.get_device_module(device)


def clock(device: torch.device) -> float:
    """Read the clock when all that was asked of the device is done.

    Args:
        device: The device.

    Returns:
        Seconds, from a beginning of no meaning.
    """
    if device.type != "cpu":
        module(device).synchronize()
    return time.perf_counter()


def visible_devices() -> list[str]:
    """List what a process is given, in CUDA_VISIBLE_DEVICES, to see one device alone.

    Returns:
        The entries of CUDA_VISIBLE_DEVICES that torch can use, or "0", "1", ... where the variable is not set.
    """
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    count = torch.cuda.device_count()
    return named[:count] if named else [str(k) for k in range(count)]


def uses_tf32() -> bool:
    """Whether float32 convolutions or matrix products of a CUDA device are rounded to TF32.

    Returns:
        True if any of torch's switches, of either of its two interfaces, allows it.
    """
    if not _PLACES:
        return bool(torch.backends.cudnn.allow_tf32) or torch.get_float32_matmul_precision() != "highest"
    return any(_precision(*place) == "tf32" for place in _PLACES)


# Of the newer interface, which there is from torch 2.9 on.
_PLACES = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")) if hasattr(torch._C, "_get_fp32_precision_getter") else ()


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Float32 products on CUDA as IEEE has them; afterwards the caller's setting, made by whichever interface of torch.

    The older one (`allow_tf32`) raises when it is read after the newer one (`fp32_precision`) was used, so that both are set:
    what runs inside may read either.

    Yields:
        Nothing; products inside have 23 bits of mantissa.
    """
    before, legacy = [_precision(*place) for place in _PLACES], _legacy()
    if legacy is not None:
        _set_legacy((False, "highest"))
    for place in _PLACES:
        _set_precision(*place, "ieee")
    try:
        yield
    finally:
        if legacy is not None:
            _set_legacy(legacy)
        for place, value in zip(_PLACES, before, strict=True):
            _set_precision(*place, value)


def _legacy() -> tuple[bool, str] | None:
    """What the older interface says, of convolutions and of products; None where the caller has used the newer one."""
    try:
        return torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_legacy(values: tuple[bool, str]) -> None:
    torch.backends.cudnn.allow_tf32 = values[0]
    torch.set_float32_matmul_precision(values[1])


def _precision(backend: str, operation: str) -> str:
    return str(torch._C._get_fp32_precision_getter(backend, operation))


def _set_precision(backend: str, operation: str, value: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operation, value)
