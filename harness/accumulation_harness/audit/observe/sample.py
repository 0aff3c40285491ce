"""Which elements of a large model are kept, the same ones in every run; of a small one, all are."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import IO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accumulation_harness.audit.evidence import SUMMED as SUMMED
from accumulation_harness.audit.evidence import Matrix, Vector
from accumulation_harness.audit.observe.tensors import dense, size, write
from accumulation_harness.observe.tensors import in_a_group
from accumulation_harness.referee.gradients import Elements, norm


@dataclass(frozen=True)
class Stored:
    """A set of tensors, in their own formats, from a byte of the store's file on."""

    store: Store
    start: int

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Write the values into tensors of the same sizes."""
        self.store.file.seek(self.start)
        for tensor, values in zip(tensors, torch.load(self.store.file), strict=True):
            write(tensor, values)


class Store:
    """A file, made when something is kept, and gone with the last set of tensors in it."""

    @cached_property
    def file(self) -> IO[bytes]:
        """It has no name."""
        file = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open as long as something is kept in it
        weakref.finalize(self, file.close)
        return file

    def add(self, tensors: Sequence[Tensor]) -> Stored:
        """Write these tensors behind those that are there. Raises OSError where there is no room."""
        try:
            kept = Stored(self, self.file.seek(0, 2))
            torch.save([dense(tensor).cpu() for tensor in tensors], self.file, _use_new_zipfile_serialization=False)
            self.file.flush()
        except OSError as error:
            message = f"the audit cannot keep the weights of N=1 in {tempfile.gettempdir()} (TMPDIR): {error.strerror}"
            raise OSError(error.errno, message) from error
        return kept


WHOLE = 2**17  # elements of a model that is kept whole
KEPT = 2**16  # elements kept of a larger one: norms are then known to about 1 %, factors and equality as before
FEWEST = 64  # elements kept of a tensor at least: no lone scalar is lost
BLOCK = 2**20  # elements looked at together, where all are looked at


class Sample:
    """Places in tensors of given sizes: one at random in each of as many equal stretches as elements are kept."""

    def __init__(self, sizes: Sequence[int], places: Sequence[Tensor | None]) -> None:
        """`places`: of each tensor, the indices [kept] of its elements that are kept; None where all are."""
        self.sizes, self.places = tuple(sizes), tuple(places)
        self.counts = tuple(n if at is None else len(at) for n, at in zip(self.sizes, self.places, strict=True))

    @property
    def whole(self) -> bool:
        """Whether all elements are kept."""
        return self.sizes == self.counts

    @property
    def size(self) -> int:
        """Number of elements kept."""
        return sum(self.counts)

    def take(self, tensors: Iterable[Tensor | None]) -> Vector:
        """[kept] The elements in order, as float64 on the host, picked where the tensors live; zeros where there is none."""
        parts = [None if tensor is None else _picked(tensor, at) for tensor, at in zip(tensors, self.places, strict=True)]
        kinds = {(part.dtype, part.device) for part in parts if part is not None}
        # of one kind, they are joined first, and so moved and widened at once
        dtype, device = kinds.pop() if len(kinds) == 1 else (torch.float64, torch.device("cpu"))
        filled = [
            torch.zeros(n, dtype=dtype, device=device) if part is None else part.to(device, dtype)
            for part, n in zip(parts, self.counts, strict=True)
        ]
        # copied, since a tensor in the memory of a vector would be taken for an average of the weights
        joined: Vector = torch.cat(filled).to("cpu", torch.float64).numpy().copy() if filled else np.zeros(0)
        return joined

    def pick(self, values: Vector) -> Vector:
        """[kept] The same elements of one vector [P] of all tensors; zeros beyond its end."""
        values = np.pad(values, (0, sum(self.sizes) - values.size))
        return self.take(torch.from_numpy(values).split(list(self.sizes)))


@contextmanager
def everything() -> Iterator[None]:
    """All is kept of the models of the block, as of those that are trained on several ranks, which exchange whole vectors."""
    _kept.append(True)
    try:
        yield
    finally:
        _kept.pop()


_kept: list[bool] = []


def sample_of(tensors: Iterable[Tensor]) -> Sample:
    """The sample of a model of these sizes.

    Args:
        tensors: Parameters or gradients of a model.

    Returns:
        Which elements are kept, and how the others are summed.
    """
    return _of_sizes(tuple(map(size, tensors)), bool(_kept) or in_a_group())


@lru_cache(maxsize=64)
def _of_sizes(sizes: tuple[int, ...], everything: bool) -> Sample:
    total = sum(sizes)
    if everything or total <= WHOLE:
        return Sample(sizes, [None] * len(sizes))
    random = np.random.default_rng(0)
    places: list[Tensor | None] = []
    for n in sizes:
        count = min(n, max(FEWEST, round(KEPT * n / total)))
        places.append(None if count == n else torch.from_numpy(_one_of_each(n, count, random)))
    return Sample(sizes, places)


def _one_of_each(n: int, count: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """One of the indices of each of `count` stretches that n indices are cut into."""
    edges = np.arange(count + 1) * n // count
    return np.asarray(edges[:-1] + (random.random(count) * np.diff(edges)).astype(np.int64))


def looked_at(tensors: Sequence[Tensor]) -> Vector:
    """The kept elements of these tensors.

    Args:
        tensors: Parameters or gradients of a model.

    Returns:
        [kept] float64.
    """
    return sample_of(tensors).take(tensors)


def by_position(row: Tensor) -> Matrix:
    """[positions, features] of one row's slope (tokens and their logits, say); one position where it is not kept whole.

    Args:
        row: [positions, features], or of another shape.

    Returns:
        [positions, features] float64.
    """
    values = looked_at([row])
    return values.reshape(-1, row.shape[-1]) if row.ndim > 1 and 0 < row.numel() == values.size else values.reshape(1, -1)


def _picked(tensor: Tensor, at: Tensor | None) -> Tensor:
    flat = dense(tensor).reshape(-1)
    return flat if at is None else flat[at.to(flat.device)]


# -- looks at every element, a block at a time -----------------------------------------------------------------------------


def all_finite(tensors: Iterable[Tensor | None]) -> bool:
    """Whether every element is: one pass that reads, since a sum with a part that is not finite is not.

    Args:
        tensors: Tensors; None counts as finite.

    Returns:
        True where no element is infinite or NaN.
    """
    present = [dense(tensor) for tensor in tensors if tensor is not None]
    return all(bool(t.sum().isfinite()) or bool(t.isfinite().all()) for t in present)


def size_of(tensors: Iterable[Tensor | None]) -> float:
    """The norm of all elements, in float64.

    Args:
        tensors: Tensors; None counts as zeros.

    Returns:
        sqrt(sum of x^2) over all elements.
    """
    present = [dense(tensor) for tensor in tensors if tensor is not None]
    return float(norm(Elements(present))) if present else 0.0


def signed_sums(parameters: Iterable[Tensor]) -> Vector:
    """Sum `SUMMED` neighbouring elements of each gradient with random signs, in float64.

    The sums are linear in the elements, and the expectation of the square of their norm is that of the elements: two
    gradients that differ in any element differ in these as well, by as much.

    Args:
        parameters: Their gradients are summed; None is zero.

    Returns:
        The sums of all tensors, one after the other.
    """
    found = [_sums(p.grad, size(p)) for p in parameters]
    joined: Vector = torch.cat(found).numpy().copy() if found else np.zeros(0)
    return joined


def _sums(tensor: Tensor | None, count: int) -> Tensor:
    if tensor is None:
        return torch.zeros(-(-count // SUMMED), dtype=torch.float64)
    flat = dense(tensor).reshape(-1)
    signs = _signs().to(flat.device)
    blocks = (block.double() for block in flat.split(BLOCK))
    padded = (torch.nn.functional.pad(block, (0, -len(block) % SUMMED)) for block in blocks)
    return torch.cat([block.reshape(-1, SUMMED) @ signs for block in padded]).cpu()


@lru_cache(maxsize=1)
def _signs() -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).choice((-1.0, 1.0), size=SUMMED))
