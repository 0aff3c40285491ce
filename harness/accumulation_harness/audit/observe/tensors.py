"""Tensors of any kind (sparse, sharded, 16-bit, on a device) as float64 vectors, and back; fingerprints of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accumulation_harness.audit.evidence import Vector


def dense(tensor: Tensor) -> Tensor:
    """The whole tensor, strided and local; for a DTensor this is a collective of all ranks. A complex one as pairs of reals.

    Args:
        tensor: A tensor of any layout, device and dtype.

    Returns:
        A strided, detached tensor, [..., 2] of a complex one.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def size(tensor: Tensor) -> int:
    """Its number of elements, as `dense` gives them.

    Args:
        tensor: A tensor.

    Returns:
        The number, twice that of the elements of a complex one.
    """
    return tensor.numel() * (1 + tensor.is_complex())


def vector(tensors: Iterable[Tensor]) -> Vector:
    """One float64 vector of all elements in order, on the host; of what is large, a `Sample` is taken instead.

    Args:
        tensors: Tensors of any shapes.

    Returns:
        [P] float64.
    """
    parts = [dense(tensor).reshape(-1).to("cpu", torch.float64) for tensor in tensors]
    joined: Vector = torch.cat(parts).numpy().copy() if parts else np.zeros(0)
    return joined


@torch.no_grad()
def put(tensors: Sequence[Tensor], values: Vector) -> None:
    """Write `values` [P] into the tensors in order; into sharded ones each rank's own part.

    Args:
        tensors: Tensors with P elements together.
        values: [P] float64.
    """
    start = 0
    for p in tensors:
        write(p, torch.from_numpy(values[start : start + size(p)]))
        start += size(p)


@torch.no_grad()
def write(tensor: Tensor, values: Tensor) -> None:
    """Write all elements of the tensor; into a sharded one this rank's own part.

    Autograd is not told: a penalty on the weights may have been built before the first forward, and stands with the new ones.

    Args:
        tensor: Any tensor, of n elements.
        values: [n] what they are to be, [2 n] for complex ones.
    """
    pairs = torch.view_as_complex(values.double().reshape(*tensor.shape, 2)) if tensor.is_complex() else values
    value = pairs.reshape(tensor.shape).to(tensor.device, tensor.dtype)
    if hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    tensor.data.copy_(value)


def roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff: half the distance from 1 to the next number.

    Args:
        dtype: A format.

    Returns:
        eps / 2; 0 for integers.
    """
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def tensors_in(values: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors in nested containers, in order.

    Args:
        values: Tensors, mappings, sequences and objects, nested.
        depth: How deep is looked.

    Yields:
        The tensors that were found.
    """
    if isinstance(values, Tensor):
        yield values
    elif depth and isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value, depth - 1)
    elif depth and isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value, depth - 1)


def fingerprints(args: Sequence[Any], kwargs: dict[str, Any], batch_size: int = 0) -> list[tuple[str, int]]:
    """Name the rows of the first tensor that has any; padding (around integers, after other numbers) does not count.

    Args:
        args: The arguments of a forward.
        kwargs: Its keyword arguments.
        batch_size: Rows to expect; 0 if unknown.

    Returns:
        Name and length of each row. The name has the hash of the row, and of a sequence two more, by which `Names` knows it.
    """
    first = next((t for t in tensors_in([*args, kwargs]) if t.ndim >= 1 and t.shape[0] > 0), None)
    if first is None or first.is_meta:
        return []
    mask = next((given.get("attention_mask") for given in (kwargs, *args) if isinstance(given, Mapping)), None)
    rows = dense(first).cpu()
    keep = dense(mask).cpu().bool() if isinstance(mask, Tensor) and mask.shape == rows.shape else None
    tokens = not rows.is_floating_point() and rows.ndim == 2
    if tokens and rows.shape[0] != batch_size == rows.shape[1]:  # time comes first
        rows, keep = rows.T, None if keep is None else keep.T
    filler = _filler(rows) if tokens and keep is None else None
    hashes = []
    for index in range(rows.shape[0]):
        row = rows[index]
        if keep is not None:
            row = row[keep[index]]
        elif not row.is_floating_point() and row.ndim == 1:
            used = ((row != 0) & (row != -100)).nonzero()
            row = row[int(used[0]) : int(used[-1]) + 1] if len(used) else row[:0]
        elif row.ndim:  # sequences of numbers or of vectors are padded to the longest of their batch
            row = row[: _end(row.reshape(row.shape[0], -1).any(1))]
        if rows[index].is_floating_point() and rows.ndim == 2:  # a last one of 0 makes no shorter sequence
            hashes.append((_hash(row), rows[index].numel()))
        elif row.ndim in (1, 2):
            bare = row if filler is None else row[: _end(row != filler)]
            hashes.append((".".join(map(_hash, (row, bare, bare[:-1]))), bare.numel()))
        else:
            hashes.append((_hash(row), row.numel()))
    return hashes


def _end(used: Tensor) -> int:
    """The place after the last element that is true."""
    places = used.nonzero()
    return int(places[-1]) + 1 if len(places) else 0


def _filler(rows: Tensor) -> Tensor | None:
    """What the rows of a batch are padded with: the value that is repeated most at the end of one; None where none is."""
    repeated = (rows == rows[:, -1:]).flip(1).cumprod(1).sum(1)
    longest = int(repeated.argmax())
    return rows[longest, -1] if repeated[longest] > 1 else None


def _hash(row: Tensor) -> str:
    content = row.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def broken(values: Any) -> bool:
    """Whether a floating tensor in there holds a non-finite number (masks of -inf are common in inputs: only NaN counts).

    Args:
        values: Anything that holds tensors.

    Returns:
        True where one holds a NaN.
    """
    return any(t.is_floating_point() and not t.is_meta and bool(dense(t).isnan().any()) for t in tensors_in(values))
