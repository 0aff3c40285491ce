"""Nests of tensors: tuples, lists, mappings and data classes, as data sets, `collate` functions and models give them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Index = Tensor | slice


def map_leaves(change: Callable[[Any], Any], nest: Any) -> Any:
    """Apply a function to every leaf of nested containers (lists, tuples, mappings, dataclasses).

    A leaf is whatever is no container; a list of texts is one leaf with a row for each text.

    Args:
        change: Called with each leaf, in order; what it gives takes the leaf's place.
        nest: The nested containers, which are not changed.

    Returns:
        New containers of the same classes.
    """
    if _is_texts(nest):
        return change(nest)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_leaves(change, one) for one in nest))
    if isinstance(nest, (list, tuple)):
        return type(nest)(map_leaves(change, one) for one in nest)
    if isinstance(nest, Mapping):
        return _mapping(nest, {key: map_leaves(change, value) for key, value in nest.items()})
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        fields = {f.name: map_leaves(change, getattr(nest, f.name)) for f in dataclasses.fields(nest) if f.init}
        return dataclasses.replace(nest, **fields)
    return change(nest)


def leaves(nest: Any) -> list[Any]:
    """List all leaves, in order.

    Args:
        nest: Nested containers, see `map_leaves`.

    Returns:
        The leaves, in the order in which `map_leaves` meets them.
    """
    found: list[Any] = []
    map_leaves(lambda leaf: found.append(leaf) or leaf, nest)  # type: ignore[func-returns-value]
    return found


def tensors(nest: Any, within: int = 3) -> Iterator[Tensor]:
    """Find the leaves that are tensors, and the tensors in attributes of leaves of other classes.

    Args:
        nest: Nested containers, see `map_leaves`.
        within: How many objects deep attributes are followed; 0 looks at leaves alone.

    Yields:
        Each tensor, as often as it is met.
    """
    for leaf in leaves(nest):
        if isinstance(leaf, Tensor):
            yield leaf
        elif within and is_opaque(leaf):
            yield from tensors([getattr(leaf, name, None) for name in _attributes(leaf)], within - 1)


def is_opaque(leaf: Any) -> bool:
    """Whether a leaf is an object that may hold tensors and is no container: a distribution, a class of somebody's own.

    Args:
        leaf: A leaf of `map_leaves`.

    Returns:
        True for an object with attributes, such as a distribution or a class of the user's; False for tensors, arrays,
        classes and modules.
    """
    return not isinstance(leaf, (Tensor, np.ndarray, type, nn.Module)) and bool(_attributes(leaf))


def _attributes(leaf: Any) -> list[str]:
    slots = (getattr(kind, "__slots__", ()) for kind in type(leaf).__mro__)
    return [*getattr(leaf, "__dict__", ()), *(name for own in slots for name in ([own] if isinstance(own, str) else own))]


def _is_texts(nest: Any) -> bool:
    """Whether it is a list of texts, as `default_collate` makes of a text in each sample."""
    return isinstance(nest, (list, tuple)) and bool(nest) and all(isinstance(one, (str, bytes)) for one in nest)


def rows(nest: Any, index: Index, of: int | None = None) -> Any:
    """Choose rows (along dimension 0) of every leaf. What has no rows, a number or a 0-dim tensor, stays as it is.

    Args:
        nest: Nested containers of leaves with n rows each.
        index: A slice, or an int64 tensor [m] of rows in the order wanted.
        of: If given, the n of a leaf that has rows; leaves of another length, class weights say, stay as they are.

    Returns:
        The same containers with m rows in each leaf.
    """

    def chosen(leaf: Any) -> Any:
        if of is not None and num_rows(leaf) != of:
            return leaf
        if isinstance(leaf, Tensor):
            return (
                leaf if leaf.dim() == 0 else leaf[index if isinstance(index, slice) else index.to(leaf.device, non_blocking=True)]
            )
        if isinstance(leaf, np.ndarray) and leaf.ndim:
            return leaf[index if isinstance(index, slice) else index.numpy()]
        if _is_texts(leaf):
            return leaf[index] if isinstance(index, slice) else type(leaf)([leaf[i] for i in index.tolist()])
        return leaf

    return map_leaves(chosen, nest)


def same(a: Any, b: Any) -> bool:
    """Compare what two nests hold, bit by bit; NaN is the same as NaN.

    Args:
        a: Nested containers, see `map_leaves`.
        b: Others.

    Returns:
        True where their leaves are equal, in order; of an object that holds tensors, where these are.
    """

    def values(nest: Any) -> list[Any]:
        return [one for leaf in leaves(nest) for one in (tensors(leaf) if is_opaque(leaf) else [leaf])]

    mine, others = values(a), values(b)
    return len(mine) == len(others) and all(
        _equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(np.all(x == y))
        for x, y in zip(mine, others, strict=True)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def joined(nests: Sequence[Any], sizes: Sequence[int] | None = None) -> Any:
    """Concatenate the rows (along dimension 0) of nests that are alike but for their numbers of rows.

    Args:
        nests: At least one nest; all have the same containers.
        sizes: If given, the number of rows of each nest; a leaf of other lengths is taken to have none.

    Returns:
        One nest; what has no rows is the first nest's.
    """
    parts = [iter(leaves(nest)) for nest in nests]

    def together(leaf: Any) -> Any:
        own = [next(part) for part in parts]
        has_rows = isinstance(leaf, Tensor) and leaf.dim() and (sizes is None or [*map(num_rows, own)] == [*sizes])
        return torch.cat(own) if has_rows else leaf

    return map_leaves(together, nests[0])


def num_rows(leaf: Any) -> int | None:
    """Rows of a leaf; None of what has none.

    Args:
        leaf: A leaf of `map_leaves`.

    Returns:
        The length along dimension 0 of a tensor or array, or the number of texts; None of anything else.
    """
    if isinstance(leaf, (Tensor, np.ndarray)):
        return len(leaf) if leaf.ndim else None
    return len(leaf) if _is_texts(leaf) else None


def placed(nest: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move arrays and tensors to a device.

    Floating numbers are rounded to float32 first and converted to `dtype` then, so that the float64 batch is exactly the
    float32 one, and two formats differ in their arithmetic alone.

    Args:
        nest: Nested containers of NumPy arrays and tensors, see `map_leaves`.
        device: Where they go; copies to a GPU do not wait.
        dtype: The format of floating numbers. Integers and bools keep theirs.

    Returns:
        The same containers, of tensors.
    """

    def moved(leaf: Any, within: int = 3) -> Any:
        if within and is_opaque(leaf) and next(tensors(leaf), None) is not None:
            leaf = copy.copy(leaf)
            for name in _attributes(leaf):
                if hasattr(leaf, name):
                    object.__setattr__(leaf, name, map_leaves(lambda one: moved(one, within - 1), getattr(leaf, name)))
            return leaf
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            leaf = torch.from_numpy(np.ascontiguousarray(leaf))
        if not isinstance(leaf, Tensor):
            return leaf
        there = leaf.to(device, non_blocking=device.type != "cpu")  # a copy to the host has to be waited for
        return there.float().to(dtype) if there.is_floating_point() else there

    return map_leaves(moved, nest)


def _mapping(like: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same kind, where that can be made of a dictionary; else the dictionary."""
    kind: Any = type(like)
    try:
        return values if kind is dict else kind(values)
    except TypeError:
        return values
