"""The machine and the versions a result was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("torch", "numpy", "hydra-core", "wandb", "pandas", "scikit-learn", "scipy")


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, processor or card, threads; nothing that names the machine or its user."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
