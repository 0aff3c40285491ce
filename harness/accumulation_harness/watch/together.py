"""Ranks that are watched together: replicas and shards whose ranks all said so, heard through the store of their group.

No collective is called: each rank leaves what it has seen under a key, and waits for the others only so long.
"""

from __future__ import annotations

import io
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, distributed

AGREES = 10.0  # seconds that a rank waits for the others to say that they watch
LATE = 30.0  # and for what they have seen of a window: replicas end theirs at about the same time
SHORTEST, LONGEST = 1e-3, 0.1  # seconds between two looks

_attached: Counter[str] = Counter()  # watches that are decided, by what they watch


class Together:
    """The ranks that watch one model."""

    def __init__(self, store: Any, name: str, members: Sequence[int]) -> None:
        self.store, self.name, self.members = store, name, members
        self.rank = distributed.get_rank()
        self.is_apart = False  # one has left, or was late once: from then on nobody is waited for
        self._written: list[str] = []

    def gathered(self, what: str, value: Mapping[str, npt.ArrayLike]) -> list[Mapping[str, npt.NDArray[Any]]] | None:
        """What each member has to hand over under this name, plain arrays; None where one is not heard."""
        if self.is_apart:
            return None
        keys = [f"{self.name}/{what}/{member}" for member in self.members]
        written = io.BytesIO()
        np.savez(written, **{name: np.asarray(of) for name, of in value.items()})  # type: ignore[arg-type]
        self._write(f"{self.name}/{what}/{self.rank}", written.getvalue())
        left = [f"{self.name}/left/{member}" for member in self.members]
        if not _are_there(self.store, keys, LATE, left):
            self.is_apart = True
            return None
        return [dict(np.load(io.BytesIO(self.store.get(key)), allow_pickle=False)) for key in keys]

    def leave(self) -> None:
        """Nobody need wait for this rank any longer."""
        self.is_apart = True
        self.store.set(f"{self.name}/left/{self.rank}", "")

    def _write(self, key: str, value: bytes) -> None:
        """Two keys back, all have read: they could not have written what was read of them since."""
        self.store.set(key, value)
        self._written.append(key)
        if len(self._written) > 2:
            self.store.delete_key(self._written.pop(0))


def agreed(members: Sequence[int], parameters: Sequence[Tensor]) -> Together | None:
    """Ask the ranks that share a model whether they watch it; all come to the same answer.

    Args:
        members: The ranks.
        parameters: What is watched here.

    Returns:
        A channel between them; None where not all of them say in time that they watch the same.
    """
    about = f"{members} {[(tuple(p.shape), str(p.dtype)) for p in parameters]}"
    store = distributed.distributed_c10d._get_default_store()
    name = _undecided(store, f"accumulation_watch/{zlib.crc32(about.encode())}")
    store.set(f"{name}/here/{distributed.get_rank()}", "")
    here = _are_there(store, [f"{name}/here/{member}" for member in members], AGREES)
    decided = store.compare_set(f"{name}/decided", "", "together" if here else "apart")  # by the first that knows
    return Together(store, name, members) if decided == b"together" else None


def _undecided(store: Any, about: str) -> str:
    """The next watch of the same of which no rank has decided before this one came."""
    while store.check([f"{about}/{_attached[about]}/decided"]):
        _attached[about] += 1
    return f"{about}/{_attached[about]}"


def _are_there(store: Any, keys: Sequence[str], patience: float, left: Sequence[str] = ()) -> bool:
    """Whether all keys are there in time, and none of those that say that nobody is coming."""
    until, pause = time.monotonic() + patience, SHORTEST
    while not store.check(list(keys)):
        if time.monotonic() > until or any(store.check([key]) for key in left):
            return bool(store.check(list(keys)))
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST)
    return True
