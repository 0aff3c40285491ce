"""The driver of a GPU, as the system shows it; nothing here imports torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

FILES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")  # of NVIDIA, Jetson (two), WSL, AMD


def is_there() -> bool:
    """Whether the system has files of a GPU driver."""
    return any(os.path.exists(path) for path in FILES)


@cache
def version() -> str | None:
    """The version of NVIDIA's driver, where its own tool tells."""
    lines = query("driver_version")
    return lines[0].strip() if lines else None


def query(fields: str) -> list[str]:
    """What `nvidia-smi --query-gpu` says, a line for each GPU; nothing where it is absent or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
