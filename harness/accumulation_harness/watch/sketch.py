"""Sketches of gradients: inner products with fixed +-1 vectors, a few numbers per tensor, which add up over shards.

The vectors are Kronecker products: sign j of element i, in block k = i div L, is R[i mod L] S[j, k mod M] T[j, k div M], with
R, S and T the same for all tensors. Hence a sketch is one matrix-vector product over the gradient and small ones with its result,
nothing of a parameter's size is kept, and a shard that begins at global element o sketches to its own share of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accumulation_harness.system.state import PLAIN

BLOCK = 256  # elements that share a sign of S
GROUP = 1 << 14  # blocks that share a sign of T
WIDTH = 8  # numbers per tensor
SEED = 20250122
CPU = torch.device("cpu")


class Signs:
    """The +-1 vectors of one parameter."""

    def __init__(self, parameter: Tensor) -> None:
        whole = int(parameter.numel()) * (2 if parameter.is_complex() else 1)  # of a DTensor: of all its shards
        self.length = _length(whole)
        self.blocks = -(-whole // self.length)
        self._at: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._on(CPU)

    def of(self, tensor: Tensor) -> Tensor:
        """[WIDTH] in float32: the sketch of a gradient, or of the shard of it that is here."""
        local, start = local_part(tensor)
        base, inner, outer = self._at.get(local.device) or self._on(local.device)
        block, offset = divmod(start, self.length)
        if not local.numel():
            return torch.zeros(WIDTH, device=local.device)
        sums = _product(_padded(local.reshape(-1), offset, self.length).view(-1, self.length), base)
        num = len(sums)
        if self.blocks <= GROUP:
            return torch.mv(inner if num == self.blocks else inner[:, block : block + num], sums)
        group, before = divmod(block, GROUP)
        grouped = _padded(sums, before, GROUP).view(-1, GROUP).double() @ inner.T  # which TF32 would round
        return (grouped * outer[group : group + len(grouped)]).sum(0).float()

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        groups = -(-self.blocks // GROUP)
        inner = _signs(WIDTH, GROUP, device, torch.float32 if groups <= 1 else torch.float64)[:, : self.blocks]
        found = self._at[device] = _signs(1, BLOCK, device)[0, : self.length], inner, _signs(groups, WIDTH, device)
        return found


@cache
def _signs(rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    if device != CPU:
        return _signs(rows, columns, CPU).to(device, dtype)
    drawn = torch.Generator().manual_seed(SEED + rows)
    return torch.randint(0, 2, (rows, columns), generator=drawn, device=CPU).mul_(2).sub_(1).to(dtype)


def _length(numel: int) -> int:
    """Elements of a block: a divisor of a parameter's where there is a long one, so that nothing is padded."""
    most = max(1, min(BLOCK, numel // (2 * WIDTH)))
    return next((n for n in range(most, most // 4, -1) if numel % n == 0), most)


def _padded(flat: Tensor, before: int, of: int) -> Tensor:
    """With so many zeros before it, and a multiple of `of`."""
    after = -(before + flat.numel()) % of
    return functional.pad(flat, (before, after)) if before or after else flat


class Sketches:
    """The sketches of all parameters of an optimizer."""

    def __init__(self, parameters: Iterable[tuple[Tensor, bool]]) -> None:
        """Each, and whether it can be looked at."""
        self.signs = [Signs(parameter if known else torch.empty(0)) for parameter, known in parameters]

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
