"""Which elements of a large model are kept, the same ones in every run; of a small one, all are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from accumulation_harness.audit.evidence import Vector

Indices = npt.NDArray[np.int64]

WHOLE = 2**17  # elements of a model that is kept whole
KEPT = 2**16  # elements kept of a larger one: norms are then known to about 1 %, factors and equality as before
FEWEST = 64  # elements kept of a tensor at least: no lone scalar is lost


class Places:
    """Places in tensors of given sizes: one at random in each of as many equal stretches as elements are kept."""

    def __init__(self, sizes: Sequence[int], *, everything: bool = False) -> None:
        """`everything`: all is kept, however large they are."""
        self.sizes = tuple(sizes)
        self.places = _places(self.sizes, everything or bool(_kept))  # of each, the indices [kept]; None where all are
        self.counts = tuple(n if at is None else len(at) for n, at in zip(self.sizes, self.places, strict=True))

    @property
    def whole(self) -> bool:
        """Whether all elements are kept."""
        return self.sizes == self.counts

    @property
    def size(self) -> int:
        """Number of elements kept."""
        return sum(self.counts)

    def pick(self, values: Vector) -> Vector:
        """[kept] The elements of one vector [P] of all tensors; zeros beyond its end."""
        values = np.pad(values, (0, sum(self.sizes) - values.size))
        edges = pairwise(np.cumsum([0, *self.sizes]))
        parts = [values[a:b] if at is None else values[a:b][at] for (a, b), at in zip(edges, self.places, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0)


@contextmanager
def everything() -> Iterator[None]:
    """Keep all elements of the models of the block, as for those on several ranks, which exchange whole vectors."""
    _kept.append(True)
    try:
        yield
    finally:
        _kept.pop()


_kept: list[bool] = []


@lru_cache(maxsize=64)
def _places(sizes: tuple[int, ...], everything: bool) -> tuple[Indices | None, ...]:
    total = sum(sizes)
    if everything or total <= WHOLE:
        return (None,) * len(sizes)
    random = np.random.default_rng(0)
    places: list[Indices | None] = []
    for n in sizes:
        count = min(n, max(FEWEST, round(KEPT * n / total)))
        places.append(None if count == n else _one_of_each(n, count, random))
    return tuple(places)


def _one_of_each(n: int, count: int, random: np.random.Generator) -> Indices:
    """One of the indices of each of `count` stretches that n indices are cut into."""
    edges = np.arange(count + 1) * n // count
    return np.asarray(edges[:-1] + (random.random(count) * np.diff(edges)).astype(np.int64))
