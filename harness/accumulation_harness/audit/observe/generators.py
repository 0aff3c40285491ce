"""Where all generators stand that a run may draw from: PyTorch's, Python's, NumPy's, and those of the run's own."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from accumulation_harness.observe.loop import draws

Standing = Mapping[int, object]  # by the generator; 0: those that everybody shares


class Generators:
    """The generators that are known so far."""

    def __init__(self) -> None:
        self.own: dict[int, Any] = {}

    def know(self, found: Iterable[Any]) -> None:
        """Those that a run was seen to hold."""
        self.own |= {id(one): one for one in found}

    def standing(self) -> Standing:
        """Of each."""
        name, *shared = np.random.get_state()
        return {
            0: (draws(), random.getstate(), name, *map(_plain, shared)),
            **{key: _state(one) for key, one in self.own.items()},
        }

    def advance(self) -> None:
        """Draw one number from each."""
        torch.rand(1)
        if torch.cuda.is_initialized():
            torch.rand(1, device="cuda")
        for one in (np.random, random, *self.own.values()):
            if isinstance(one, torch.Generator):
                torch.rand(1, generator=one, device=one.device)
            else:
                one.random()


def drawn(before: Standing, after: Standing) -> bool:
    """Whether one of those that were known before has been drawn from."""
    return any(after.get(key) != state for key, state in before.items())


def _state(generator: Any) -> object:
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return tuple(map(_plain, generator.get_state()))
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return generator.get_state().numpy().tobytes()


def _plain(value: object) -> object:
    return value.tobytes() if isinstance(value, np.ndarray) else value
