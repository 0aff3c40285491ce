"""The driver of a GPU, as the system shows it; nothing here imports torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

FILES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")  # of NVIDIA, Jetson (two), WSL, AMD
PATIENCE_SECONDS = 20.0  # eight cold cards take some of them; a card that has fallen off the bus takes for ever


@dataclass(frozen=True)
class Answer:
    """What `nvidia-smi` says: the driver's version, by card, and what is wrong with its answer. Without it there are no cards."""

    cards: tuple[str, ...] = ()
    problem: str | None = None


def is_there() -> bool:
    """Whether the system has files of a GPU driver.

    Returns:
        True if one of `FILES` exists; no tool is started for it.
    """
    return any(os.path.exists(path) for path in FILES)


def version() -> str | None:
    """The version of NVIDIA's driver, where its own tool tells.

    Returns:
        The version of NVIDIA's driver as nvidia-smi prints it, `570.86` say; None where nvidia-smi shows no card.
    """
    return next(iter(answer().cards), None)


@cache
def answer() -> Answer:
    """What `nvidia-smi` says of all cards, whichever CUDA_VISIBLE_DEVICES shows; asked once, for it may take its time or hang.

    Returns:
        Cards and driver; empty without the tool.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Answer()
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_SECONDS, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return Answer(problem=f"nvidia-smi did not answer within {PATIENCE_SECONDS:.0f} s")
    except OSError as error:
        return Answer(problem=f"nvidia-smi cannot be started ({error.strerror})")
    first = next(iter(done.stdout.split("\n")), "").strip()
    if done.returncode:
        return Answer(problem=f"nvidia-smi ended with code {done.returncode}: {first!r}")
    rows = done.stdout.split()
    cards = tuple(row for row in rows if re.fullmatch(r"\d+(\.\d+)+", row))
    return Answer(
        cards, None if len(cards) == len(rows) else f"nvidia-smi did not answer with a version for each card: {first!r}"
    )
