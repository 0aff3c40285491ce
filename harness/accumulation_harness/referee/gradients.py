"""Distances between gradients, and the decomposition of one gradient into others. All sums are float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors  # one call where reshape and cat take one for each tensor

from accumulation_harness.judge.signature import Comparison, Decomposition

# Elements compared at once. On a CPU 0.5 MiB of float64 stays in the cache, and what is freed stays with the process: blocks of
# 1 MiB went back to the system and were faulted in again: 8 times as long for 370,000 parameters. A GPU wants few kernels.
BLOCK, BLOCK_ON_DEVICE = 2**16, 2**22
MOST_AT_ONCE = 2**22  # elements of a matrix that is factorised at once, with its factors: 32 MiB


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate tensors.

    Args:
        tensors: The tensors.

    Returns:
        One new float64 vector of all elements, in the order given.
    """
    with torch.no_grad():
        own = tuple(tensors)
        if len(own) == 1:
            return own[0].reshape(-1).to(torch.float64, copy=True)
        flat: Tensor = _flatten_dense_tensors(own)
        return flat.double()


def gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Return the gradient of each parameter.

    Args:
        parameters: The parameters.

    Returns:
        Their `.grad`, with zeros where there is none.
    """
    return (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)


def _block(device: torch.device) -> int:
    return BLOCK if device.type == "cpu" else BLOCK_ON_DEVICE


class Elements:
    """All elements of some tensors as vectors of at most BLOCK elements each (BLOCK_ON_DEVICE on a GPU).

    Few elements are converted to float64 once. Many stay in their tensors, and are read block by block in their format.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        own = [tensor.detach() for tensor in tensors]
        self._block = _block(own[0].device)
        is_small = sum(tensor.numel() for tensor in own) <= self._block
        self._vector = flatten(own) if is_small else None
        self.tensors = [] if is_small else own  # what stays as it is: many elements, tensor by tensor

    def vector(self) -> Tensor:
        """[P] float64, all of them."""
        return flatten(self.tensors) if self._vector is None else self._vector

    def kept(self) -> Elements:
        """The same in memory of its own, whatever becomes of the tensors."""
        return self if self._vector is not None else Elements([tensor.clone() for tensor in self.tensors])

    def __iter__(self) -> Iterator[Tensor]:
        return _blocks(self.tensors, self._block) if self._vector is None else iter([self._vector])


def _blocks(tensors: Iterable[Tensor], block: int) -> Iterator[Tensor]:
    """Cut all elements, in order, into vectors in their own format, each made when it is asked for.

    Args:
        tensors: The tensors.
        block: The most elements of a vector.

    Yields:
        A vector of at most `block` elements; one that lies within a single tensor is a view of it.
    """
    group: list[Tensor] = []
    room = block
    for tensor in tensors:
        for piece in tensor.reshape(-1).split(block) if tensor.numel() > block else (tensor,):
            if group and piece.numel() > room:
                yield _joined(group)
                group, room = [], block
            group.append(piece)
            room -= piece.numel()
    if group:
        yield _joined(group)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].reshape(-1) if len(tensors) == 1 else _flatten_dense_tensors(tensors)


def norm(a: Elements) -> Tensor:
    """Compute ||a||.

    Args:
        a: The elements.

    Returns:
        A 0-dimensional float64 tensor on the device.
    """
    squares = [_square(x) for x in a]
    return squares[0].sqrt() if len(squares) == 1 else torch.stack(squares).sum().sqrt()


@torch.no_grad()
def distances_to(reference: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> Tensor:
    """Compute the distances of several lists of tensors to a reference.

    Few elements are compared in one pass. Of many, the reference is read once and each block is freed before the next. A
    difference is then rounded once in the format of the tensors, by a relative 2^-24 in float32.

    Args:
        reference: Tensors with P elements together.
        others: A lists of tensors of the same shapes.

    Returns:
        [A] float64 on the device.
    """
    block = _block(reference[0].device)
    if len(others) * sum(tensor.numel() for tensor in reference) <= block:
        rows = flatten(tensor for own in others for tensor in own).reshape(len(others), -1) - flatten(reference)
        distances: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return distances
    own = [_blocks(tensors, block) for tensors in others]
    squares = [torch.stack([_square(next(vectors) - x) for vectors in own]) for x in _blocks(reference, block)]
    return torch.stack(squares).sum(0).sqrt()


def _square(x: Tensor) -> Tensor:
    """0-dim float64: ||x||^2."""
    wide = x.double()
    return wide @ wide


def moments_of(a: Elements, g: Elements) -> Tensor:
    """Compute the squares of which with ||g||^2 `moments` are made, over blocks of elements.

    Of many elements a difference is rounded once in the format of the tensors.

    Args:
        a: The elements of the gradient.
        g: The elements of the reference.

    Returns:
        [2] ||a - g||^2 and ||a||^2.
    """
    parts = [torch.stack([_square(x - y), _square(x)]) for x, y in zip(a, g, strict=True)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def moments(a: Tensor, g: Tensor) -> Tensor:
    """Compute the squares and products that distances are made of, without waiting for the device.

    Args:
        a: [P].
        g: [P].

    Returns:
        [4] float64 on the device: ||a - g||^2, ||a||^2, ||g||^2, <a, g>.
    """
    difference = a - g
    return torch.stack([difference @ difference, a @ a, g @ g, a @ g])


def comparison(four: Sequence[float]) -> Comparison:
    """Compute a comparison from the four numbers of `moments`.

    Args:
        four: ||a - g||^2, ||a||^2, ||g||^2 and <a, g>.

    Returns:
        Distance, scale and cosine; NaN, which never passes, if the reference is zero or not finite.
    """
    difference, a, g, product = four
    if not g > 0:
        return Comparison()
    cosine = product / (math.sqrt(a) * math.sqrt(g)) if a > 0 else math.nan  # a * g may underflow
    return Comparison(math.sqrt(difference / g), math.sqrt(a / g), cosine)


def compare(a: Tensor, g: Tensor) -> Comparison:
    """Compare two gradients.

    Args:
        a: [P] float64, the gradient.
        g: [P] float64, the reference.

    Returns:
        Distance, scale and cosine; NaN, which never passes, if the reference is zero or not finite.
    """
    return comparison(moments(a, g).tolist())


def relative_distance(a: Tensor, g: Tensor, *, places: Sequence[slice] = (slice(None),)) -> float:
    """Compute ||a - g|| / ||g||.

    Args:
        a: [P] the gradient.
        g: [P] the reference.
        places: Slices whose elements are compared, together; all by default.

    Returns:
        The distance; 0 if both are zero, infinite if only g is.
    """
    scale = math.hypot(*(float(torch.linalg.vector_norm(g[place])) for place in places))
    distance = math.hypot(*(float(torch.linalg.vector_norm(a[place] - g[place])) for place in places))
    if scale == 0:
        return 0.0 if distance == 0 else math.inf
    return distance / scale


def decompose(a: Tensor, parts: Sequence[Tensor]) -> Decomposition:
    """Decompose a gradient into micro-batch gradients by least squares, in float64.

    Args:
        a: [P] the gradient.
        parts: N micro-batch gradients [P].

    Returns:
        Weights (all 1 if a is the mean of the parts), residual and condition number; NaN if a vector is not finite.
    """
    return decompose_rows([(a, parts)])


def decompose_rows(rows: Iterable[tuple[Tensor, Sequence[Tensor]]]) -> Decomposition:
    """Decompose a gradient of which, as of its parts, some elements are there at a time.

    A QR factorisation of the row blocks (tall-skinny QR; Demmel et al. 2012, arXiv:0808.2664) keeps few rows in memory at a
    time. The columns of R are scaled to unit length, so that the condition number describes directions and not sizes.

    Args:
        rows: Consecutive elements of the gradient [n], and the same ones of each part.

    Returns:
        As `decompose`.
    """
    triangle: Tensor | None = None
    for a, parts in rows:
        most = MOST_AT_ONCE // (2 * (len(parts) + 1))
        for start in range(0, len(a), most):
            block = torch.stack([one[start : start + most] for one in (*parts, a)], dim=1)
            whole = block if triangle is None else torch.cat([triangle, block])
            triangle = torch.linalg.qr(whole, mode="r").R
    assert triangle is not None
    num = triangle.shape[1] - 1
    lengths = torch.linalg.vector_norm(triangle, dim=0)
    if not bool(torch.isfinite(lengths).all()):
        return Decomposition((math.nan,) * num)
    norm, lengths = lengths[num], torch.where(lengths > 0, lengths, 1.0)[:num]
    r, coordinates, rest = triangle[:num, :num] / lengths, triangle[:num, num], triangle[num:, num]
    singular = torch.linalg.svdvals(r).tolist()
    condition = singular[0] / singular[-1] if singular[-1] > 0 else math.inf
    # Least squares through the pseudo-inverse of the small r: it also answers for collinear parts.
    weights = (torch.linalg.pinv(r) @ coordinates) / lengths * num
    residual = float(torch.linalg.vector_norm(rest) / norm) if norm > 0 else math.nan
    return Decomposition(tuple(weights.tolist()), residual, condition)


def by_tensor(model: nn.Module) -> dict[str, slice]:
    """Return where each parameter is in the model's flat gradient.

    Args:
        model: The model.

    Returns:
        A slice of the flat gradient, by the parameter's name.
    """
    edges = pairwise(accumulate((p.numel() for p in model.parameters()), initial=0))
    return {name: slice(*edge) for (name, _), edge in zip(model.named_parameters(), edges, strict=True)}


def group_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of an optimizer's parameter groups.

    Args:
        optimizer: The optimizer.

    Returns:
        The `name` of each group, or its number if it has no name of its own.
    """
    names = [group.get("name") for group in optimizer.param_groups]
    return [str(k) if name is None or names.count(name) > 1 else str(name) for k, name in enumerate(names)]


def by_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[slice]]:
    """Return where the parameters of each group are in the model's flat gradient.

    Args:
        model: The model.
        optimizer: Its optimizer.

    Returns:
        Slices of the flat gradient, by the group's name (`group_names`).
    """
    where = dict(zip(model.parameters(), by_tensor(model).values(), strict=True))
    return {
        name: [where[p] for p in group["params"]]
        for name, group in zip(group_names(optimizer), optimizer.param_groups, strict=True)
        if group["params"]
    }
