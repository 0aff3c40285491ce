"""Sketches of gradients: inner products with fixed +-1 vectors, a few numbers per tensor, which add up over shards.

The vectors are Kronecker products: sign j of element i, in block k = i div L, is R[i mod L] S[j, k mod M] T[j, k div M], with
R, S and T the same for all tensors, and T[j, 0] = 1. Hence a sketch is two matrix-vector products (which use no TF32) for each
group of M blocks, nothing of a parameter's size is kept or made, and a shard that begins at global element o sketches to its own
share of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from accumulation_harness.watch.shards import Held, cut

BLOCK = 256  # elements that share a sign of S
GROUP = 1 << 14  # blocks that share a sign of T
WIDENED = 1 << 10  # blocks of 16 bits that are widened at a time; a divisor of GROUP
WIDTH = 8  # numbers per tensor
FOLDED = 64  # rows of a sketch that ranks tell each other
SEED = 20250122
CPU = torch.device("cpu")


class Signs:
    """The +-1 vectors of one parameter."""

    def __init__(self, held: Held, *, is_complex: bool = False) -> None:
        self.dim, self.start, self.placements = held.dim, held.start, held.placements
        whole, self.here = (number * (2 if is_complex else 1) for number in (held.elements, held.here))
        self.length = _length(whole)
        self.blocks = -(-whole // self.length)
        self._at: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._on(CPU)

    def of(self, tensor: Tensor) -> Tensor:
        """[WIDTH] in float32: the sketch of a gradient, or of the shard of it that is here."""
        local, start = local_part(cut(tensor, self.placements) if self.placements else tensor), 0
        if not local.numel():
            return torch.zeros(WIDTH, device=local.device)
        local = local.movedim(self.dim, 0) if self.dim else local
        if local.numel() == self.here:  # a slice
            start = self.start * (local.numel() // len(local))
        base, inner, outer = self._at.get(local.device) or self._on(local.device)
        flat, most = local.reshape(-1), GROUP if local.dtype == base.dtype else WIDENED
        if flat.numel() == self.blocks * self.length and self.blocks <= most:  # most tensors
            return torch.mv(inner, torch.mv(flat.view(-1, self.length).to(base.dtype), base))
        parts = []
        for number, blocks in self._blocks(flat, start, most):
            group, place = divmod(number, GROUP)
            sums = torch.mv(blocks.to(base.dtype), base)
            part = torch.mv(inner[:, place : place + len(sums)], sums)
            parts.append(part * outer[group] if group else part)
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _blocks(self, flat: Tensor, start: int, most: int) -> Iterator[tuple[int, Tensor]]:
        """What begins at element `start`, in blocks [at most `most`, L] of one group each, and the number of the first."""
        length, done = self.length, 0
        while done < flat.numel():
            number, before = divmod(start + done, length)
            whole = min(most - number % most, (flat.numel() - done) // length) if not before else 0
            size = whole * length or min(length - before, flat.numel() - done)
            blocks = flat[done : done + size]
            if not whole:
                blocks = functional.pad(blocks, (before, length - before - size))
            yield number, blocks.view(-1, length)
            done += size

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        groups = -(-self.blocks // GROUP)
        inner = _signs(WIDTH, GROUP, device)[:, : self.blocks]
        found = self._at[device] = _signs(1, BLOCK, device)[0, : self.length], inner, _signs(groups, WIDTH, device)
        return found


@cache
def _signs(rows: int, columns: int, device: torch.device) -> Tensor:
    if device != CPU:
        return _signs(rows, columns, CPU).to(device)
    drawn = torch.Generator().manual_seed(SEED + rows)
    return torch.randint(0, 2, (rows, columns), generator=drawn, device=CPU).mul_(2).sub_(1).float()


def _length(numel: int) -> int:
    """Elements of a block: a divisor of a parameter's where there is a long one, so that nothing is padded."""
    most = max(1, min(BLOCK, numel // (2 * WIDTH)))
    return next((n for n in range(most, most // 4, -1) if numel % n == 0), most)


class Sketches:
    """The sketches of all parameters of an optimizer."""

    def __init__(self, parameters: Iterable[tuple[Tensor, Held]]) -> None:
        self.signs = [Signs(held, is_complex=p.is_complex()) for p, held in parameters]

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """[T] sketches of [WIDTH]; None where there is no tensor."""
        return [None if t is None else signs.of(t.detach()) for signs, t in zip(self.signs, tensors, strict=True)]


def local_part(tensor: Any) -> Tensor:
    """Take what of a tensor is held here.

    Args:
        tensor: Any tensor, also sharded, sparse or complex.

    Returns:
        Dense and real; complex numbers have a last dimension of 2.
    """
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def folded(sketch: npt.NDArray[np.float64], most: int = FOLDED) -> npt.NDArray[np.float32]:
    """Fold a sketch, so that what ranks send each other of a window stays small.

    Args:
        sketch: [T, WIDTH] of T tensors.
        most: Rows that are left.

    Returns:
        [min(T, most), WIDTH]: sums of tensors with random signs.
    """
    signs = np.random.default_rng(SEED).choice((-1.0, 1.0), len(sketch))
    padded = np.zeros((-(-len(sketch) // most) * most, WIDTH))
    padded[: len(sketch)] = signs[:, None] * sketch
    found: npt.NDArray[np.float64] = padded.reshape(-1, most, WIDTH).sum(0)
    return found[: len(sketch)].astype(np.float32)
