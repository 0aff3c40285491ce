"""The machine, the versions and the commit a result was made with."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from accumulation_harness.system import accelerator, driver, source
from accumulation_harness.system.packages import version

PACKAGES = ("torch", "numpy", "hydra-core", "wandb", "pandas", "scikit-learn", "scipy")

CHOICES = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # environment variables


def describe(device: torch.device, not_deterministic: Sequence[str] = ()) -> dict[str, Any]:
    """Describe where a trial ran; nothing names the machine or its user.

    Args:
        device: Where it ran.
        not_deterministic: Operations that the device has no deterministic kernel for, as the trial met them.

    Returns:
        Versions, processor or card, threads, commit, as plain JSON types.
    """
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "vectors": vectors(),
        "device": name_of(device),
        **(_card(device) if device.type == "cuda" else {}),
        **({"not_deterministic": list(not_deterministic)} if not_deterministic else {}),
        "threads": torch.get_num_threads(),
        "packages": {name: version(name) or "absent" for name in PACKAGES},
        **source.commit(),
    }


def vectors() -> str:
    """Name the instructions of PyTorch, and the settings by which libraries choose theirs: the last digits depend on them.

    Returns:
        As `AVX2 MKL_CBWR=COMPATIBLE`.
    """
    return " ".join(
        [torch.backends.cpu.get_cpu_capability(), *(f"{name}={os.environ[name]}" for name in CHOICES if name in os.environ)]
    )


def _processor() -> str:
    """The model of the processor, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def name_of(device: torch.device) -> str:
    """The card's name, or the kind of device.

    Args:
        device: Device of a trial.

    Returns:
        A name.
    """
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _card(device: torch.device) -> dict[str, Any]:
    """What results on a CUDA device may depend on: its libraries, driver, memory, and whether TF32 is on."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver.version(),
        "capability": f"{properties.major}.{properties.minor}",
        "device_bytes": properties.total_memory,
        "tf32": accelerator.uses_tf32(),
    }
