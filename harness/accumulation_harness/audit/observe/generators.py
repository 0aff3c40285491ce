"""Where all generators stand that a run may draw from: PyTorch's, Python's, NumPy's, and those of the run's own."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from accumulation_harness.observe.loop import draws
from accumulation_harness.system.state import standing

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
        shared = (draws(), random.getstate(), _plain(np.random.get_state()))
        return {0: shared, **{key: _plain(standing(one)) for key, one in self.own.items()}}

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
    """Whether a generator that was known before has been drawn from.

    Args:
        before: States of the generators.
        after: States of the generators later.

    Returns:
        True where one has moved.
    """
    return any(after.get(key) != state for key, state in before.items())


def _plain(state: object) -> object:
    """A state whose comparison is one truth value."""
    match state:
        case torch.Tensor():
            return state.numpy().tobytes()
        case dict():  # of a generator of NumPy's: it may hold arrays
            return repr(state)
        case tuple():
            return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)
    return state
