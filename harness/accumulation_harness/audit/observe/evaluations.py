"""Runs, and evaluations inside of them, that leave no trace on the random numbers of others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from accumulation_harness.observe.patches import Patches


def standing_now() -> Callable[[], None]:
    """What puts the shared generators back to where they are now, also that of a GPU which is used for the first time since.

    Returns:
        A function that puts them back.
    """
    of_python, of_numpy, of_torch, seed = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.initial_seed()
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)
        elif torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)  # with which CUDA begins: torch seeds both alike

    return restore


@contextmanager
def evaluations_apart() -> Iterator[None]:
    """Put the generators back whenever a model goes from `eval()` to `train()`, so that evaluations draw nothing."""
    held = dict[int, Callable[[], None]]()
    inside = False  # a module hands the call on to its children

    def train(original: Callable[..., Any], module: nn.Module, mode: bool = True) -> Any:
        nonlocal inside
        if inside:
            return original(module, mode)
        inside = True
        try:
            if not mode and module.training:
                held[id(module)] = standing_now()
            elif mode and not module.training and (restore := held.pop(id(module), None)) is not None:
                restore()
            return original(module, mode)
        finally:
            inside = False

    patches = Patches()
    patches.replace({(nn.Module, "train"): train})
    try:
        yield
    finally:
        patches.restore()
