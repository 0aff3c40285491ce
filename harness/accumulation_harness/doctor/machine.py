"""The facts of a machine that a result or a failure on it may depend on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from typing import Any

import torch

from accumulation_harness import accelerator, driver
from accumulation_harness.packages import version

PACKAGES = ("torch", "numpy", "hydra-core", "wandb", "pandas", "scikit-learn", "scipy", "accelerate", "lightning", "transformers")
SIZE = 1024  # of the square matrices whose product is timed; a quarter of it on a CPU
SECONDS = 0.3  # of products of a format
FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SLOW_FLOAT64 = 2.0  # TFLOP/s; data-centre cards do ten and more, consumer cards about a half
GPU_WORK = 12 * 25e12  # FLOP in float64 of `make gpu`: 12 trials of ResNet-18, 20 windows of 6 arms each (estimated)
REPORT_MINUTES = 16  # of `make report` on two cores, without its set-up of two minutes: 15.6 in one run
SMALLER = 0.05  # of that work, with a quarter of the width and of the windows


def describe() -> dict[str, Any]:
    """All facts, as JSON has them; nothing that names the machine or its user."""
    reason = accelerator.why_unavailable()
    device = torch.device("cpu") if reason else torch.device("cuda", 0)
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "torch_cuda": torch.version.cuda or torch.version.hip,
        "cudnn": _cudnn() if reason is None else None,
        "driver": driver.version(),
        "why_no_gpu": reason,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "devices": [] if reason else [_card(k) for k in range(torch.cuda.device_count())],
        "cards_of_driver": [", ".join(card[1:]) for card in driver.answer().cards],
        "driver_problem": driver.answer().problem,
        "tf32": accelerator.uses_tf32(),
        "tflops": {str(dtype).removeprefix("torch."): tflops(device, dtype) for dtype in FORMATS},
    }


def _cudnn() -> int | str | None:
    """Its version, or why torch cannot use the one that it has found."""
    try:
        found: int | None = torch.backends.cudnn.version()
    except RuntimeError as error:
        return _first_line(error)
    return found


def _card(index: int) -> dict[str, Any]:
    """Name, capability and memory; `problem` where a card that is counted does not answer: another process has all of it."""
    try:
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return {"problem": _first_line(error)}
    capability = f"{properties.major}.{properties.minor}"
    return {"name": properties.name, "capability": capability, "free_bytes": free, "total_bytes": total}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """10^12 floating-point operations per second of a matrix product, without TF32; None where there is none in this format."""
    size = SIZE if device.type != "cpu" else SIZE // 4
    try:
        with accelerator.ieee_float32():
            factor = torch.ones(size, size, device=device, dtype=dtype)
            float((factor @ factor)[0, 0])  # the library's start is not timed
            count, started = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - started) < SECONDS:
                product = factor @ factor
                float(product[0, 0])  # waits for the device
                count += 1
    except RuntimeError:  # NotImplementedError is one
        return None
    return float(2 * size**3 * count / elapsed / 1e12)


def is_slow(facts: Mapping[str, Any]) -> bool:
    """Whether float64 is so slow on the GPU, or so little known of it, that `make gpu` does less of it."""
    return (facts.get("tflops", {}).get("float64") or 0.0) < SLOW_FLOAT64


def advice(facts: dict[str, Any]) -> list[str]:
    """What follows from the facts, in sentences."""
    lines, reason, rate = [], facts["why_no_gpu"], facts["tflops"]["float64"]
    if reason is None:
        lines.append(f"{len(facts['devices'])} GPU(s) can be used: a sweep runs workers= trials on each, one unless told.")
    else:
        lines.append(f"No GPU can be used: {reason}.")
    if facts["driver_problem"]:
        lines.append(f"The driver cannot be asked: {facts['driver_problem']}.")
    if reason and facts["cards_of_driver"] and not facts["torch_cuda"]:
        lines.append(
            "nvidia-smi shows a card that this build of torch cannot use: install a CUDA build (make clean, then make gpu)."
        )
    elif reason and "too old" in reason:
        lines.append(
            "Install a newer driver, or a torch for an older CUDA: make TORCH_INDEX=https://download.pytorch.org/whl/cu126"
        )
    if facts["tf32"]:
        lines.append("TF32 is on in torch's settings: trials switch it off; an audit of your own loop allows for it on a GPU.")
    if reason is None and is_slow(facts):
        shown = "unknown" if rate is None else f"{rate:.2g} TFLOP/s"
        lines.append(f"float64 is slow here ({shown}): make gpu runs fewer float64 steps and a narrower ResNet.")
    return lines


def estimates(facts: dict[str, Any]) -> dict[str, str]:
    """How long the long commands should take: all of it estimated."""
    cores, rate = facts["cores"] or 1, facts["tflops"]["float64"]
    found = {"make report": f"about {max(5, round(REPORT_MINUTES * 2 / cores))} min on the CPU", "make bench": "about 60 min"}
    if facts["why_no_gpu"] is None and rate:
        work = GPU_WORK * (SMALLER if is_slow(facts) else 1.0)
        found["make gpu"] = f"about {round(15 + 3 * work / (rate * 1e12) / 60)} min"
    return found
