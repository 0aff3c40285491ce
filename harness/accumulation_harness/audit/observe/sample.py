"""What is kept of tensors: a sample of a large model's, which weights lead, and sums over every element."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import IO

import numpy as np
import torch
from torch import Tensor

from accumulation_harness.audit.evidence import SUMMED as SUMMED
from accumulation_harness.audit.evidence import Matrix, Vector
from accumulation_harness.audit.observe.places import Indices, Places
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


BLOCK = 2**20  # elements looked at together, where all are looked at


class Sample(Places):
    """The elements of tensors that are kept."""

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


def sample_of(tensors: Iterable[Tensor]) -> Sample:
    """The sample of a model of these sizes.

    Args:
        tensors: Parameters or gradients of a model.

    Returns:
        Which elements are kept, and how the others are summed.
    """
    return Sample([*map(size, tensors)], everything=in_a_group())


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


def _picked(tensor: Tensor, at: Indices | None) -> Tensor:
    flat = dense(tensor).reshape(-1)
    return flat if at is None else flat[torch.from_numpy(at).to(flat.device)]


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
