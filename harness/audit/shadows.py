"""Averaged copies of the weights (EMA), found in a running program by their shapes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.audit.tensors import vector

PLAIN = (Tensor, nn.Parameter)  # not the fake ones of a compiler, nor sharded ones
NEAR = 0.5  # an average of weights stays within this relative distance of them; lists of gradients or batches do not


def find(parameters: Sequence[Tensor], excluded: Iterable[Tensor]) -> list[list[Tensor]]:
    """Containers (modules, dicts, lists) of tensors shaped like `parameters`, near them in value, and none of them."""
    if any(hasattr(p, "full_tensor") for p in parameters):
        return []  # reading a sharded tensor is a collective, and every rank finds objects in an order of its own
    taken = {_storage(tensor) for tensor in [*parameters, *excluded]}
    shapes = [tuple(p.shape) for p in parameters]
    found: dict[tuple[int, ...], list[Tensor]] = {}
    for item in gc.get_objects():
        tensors = _tensors(item, len(shapes))
        if tensors is None:
            continue
        matched = _match(tensors, shapes)
        if matched is not None and not any(_storage(tensor) in taken for tensor in matched) and _near(matched, parameters):
            found.setdefault(tuple(sorted(_storage(tensor) for tensor in matched)), matched)
    return list(found.values())


def _storage(tensor: Tensor) -> int:
    """Identity of the memory; tensors without memory of their own (sparse, wrapped) stand for themselves."""
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _tensors(item: Any, count: int) -> list[Tensor] | None:
    if issubclass(type(item), nn.Module):  # not isinstance: it would wake lazy proxies, and fail on dead weak ones
        tensors = list(item.parameters()) if "_parameters" in vars(item) else []
        return tensors if tensors and all(type(tensor) in PLAIN for tensor in tensors) else None
    if type(item) not in (list, tuple, dict) or not count <= len(item) <= 4 * count + 8:
        return None
    values = list(item.values()) if type(item) is dict else list(item)
    return values if all(type(value) in PLAIN for value in values) else None


def _match(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor] | None:
    """The floating tensors whose shapes are `shapes` in order; others in between are buffers."""
    matched: list[Tensor] = []
    for tensor in tensors:
        if len(matched) < len(shapes) and tensor.is_floating_point() and tuple(tensor.shape) == shapes[len(matched)]:
            matched.append(tensor)
    return matched if len(matched) == len(shapes) else None


def _near(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    mine, theirs = vector(tensors), vector(parameters)
    size = float(np.linalg.norm(theirs))
    return size > 0 and float(np.linalg.norm(mine - theirs)) < NEAR * size
