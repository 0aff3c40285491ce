"""Lets a torchvision that was built for CUDA be imported beside a torch for CPUs, where none of its operators is used."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch

TORCHVISION = Path(str(find_spec("torchvision").origin)).parent  # type: ignore[union-attr]
try:
    torch.ops.load_library(next(TORCHVISION.glob("_C*")))
except OSError:  # they are declared and left empty
    sources = "".join(path.read_text() for path in TORCHVISION.glob("_*_registrations.py"))
    declared = torch.library.Library("torchvision", "DEF")
    for name in dict.fromkeys(re.findall(r"torchvision::(\w+)", sources)):
        declared.define(f"{name}(Tensor x) -> Tensor")
