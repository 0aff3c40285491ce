"""Sketches of gradients: inner products with fixed +-1 vectors, a few numbers per tensor, which add up over shards.

The vector of a tensor is a Kronecker product: sign j of element i is R[i mod L] S[j, i div L], where R is one fixed block and S
is drawn from the parameter's name. Hence a sketch is one matrix-vector product over the gradient and a product with the small S,
and a shard that begins at global element o sketches to its own share of the whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from accumulation_harness.system.state import PLAIN

BLOCK = 256  # elements that share a sign of S
WIDTH = 8  # numbers per tensor
SEED = 20250122


class Signs:
    """The +-1 vectors of one parameter."""

    def __init__(self, name: str, parameter: Tensor) -> None:
        whole = int(parameter.numel()) * (2 if parameter.is_complex() else 1)  # of a DTensor: of all its shards
        self.length = _length(whole)
        self.blocks = -(-whole // self.length)
        own = torch.Generator().manual_seed(zlib.crc32(name.encode()) + SEED)
        self.rows = torch.randint(0, 2, (WIDTH, self.blocks), generator=own, dtype=torch.int8).mul_(2).sub_(1)  # [WIDTH, blocks]
        self.base = torch.randint(0, 2, (self.length,), generator=torch.Generator().manual_seed(SEED)).mul_(2).sub_(1).float()
        self._at: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """[WIDTH] in float32: the sketch of a gradient, or of the shard of it that is here."""
        local, start = local_part(tensor)
        rows, base = self._on(local.device)
        flat = local.reshape(-1)
        first, offset = divmod(start, self.length)
        if offset or flat.numel() % self.length:
            flat = torch.nn.functional.pad(flat, (offset, -(offset + flat.numel()) % self.length))
        num = flat.numel() // self.length
        if not num:
            return torch.zeros(WIDTH, device=local.device)
        return torch.mv(rows if num == self.blocks else rows[:, first : first + num], _product(flat.view(num, -1), base))

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        found = self._at.get(device)
        if found is None:
            found = self._at[device] = (self.rows.to(device, torch.float32), self.base.to(device))
        return found


def _length(numel: int) -> int:
    """Elements of a block: a divisor of a parameter's where there is a long one, so that nothing is padded."""
    most = max(1, min(BLOCK, numel // (2 * WIDTH)))
    return next((n for n in range(most, most // 4, -1) if numel % n == 0), most)


class Sketches:
    """The sketches of all parameters of an optimizer."""

    def __init__(self, named: Iterable[tuple[str, Tensor, bool]]) -> None:
        """Name, parameter, and whether it can be looked at."""
        self.signs = [Signs(name, parameter if known else torch.empty(0)) for name, parameter, known in named]

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """[T] sketches of [WIDTH]; None where there is no tensor."""
        return [None if t is None else signs.of(t.detach()) for signs, t in zip(self.signs, tensors, strict=True)]


def local_part(tensor: Any) -> tuple[Tensor, int]:
    """What of a tensor is held here, dense and real, and the global index of its first element (of shards along dimension 0)."""
    if type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_complex():  # nearly all are
        return tensor, 0
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not hasattr(tensor, "to_local"):
        return tensor, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = tensor.to_local()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    inner = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1
    return local, int(offsets[0]) * inner if offsets else 0


def _product(blocks: Tensor, base: Tensor) -> Tensor:
    """[blocks] without TF32, which matrix-vector products do not use; 16-bit gradients are widened first."""
    return torch.mv(blocks if blocks.dtype == base.dtype else blocks.to(base.dtype), base)
