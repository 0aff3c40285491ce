"""The objects of this process that somebody still holds."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (
    Tensor,
    nn.Parameter,
)  # by type alone: to ask an object for its class would wake lazy proxies, and fail on dead weak ones


def alive() -> list[Any]:
    """All of them, after a collection: what an earlier run has left behind is no optimizer and no average of this one."""
    gc.collect()
    return gc.get_objects()


def readable(item: Any) -> bool:
    """Whether any object of the process is a plain tensor whose numbers are in memory.

    Of all others (a compiler's fake tensors, subclasses, sharded, sparse, nested and meta tensors, those of a transform that has
    ended) nothing is known: operations may raise on them, and a read of memory that was given back ends the process.
    """
    try:
        if type(item) not in PLAIN or item.layout != torch.strided or item.is_meta or item.is_nested or item.is_quantized:
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(item) or torch._is_functional_tensor(item):
            return False
        last = item.storage_offset() + sum((n - 1) * step for n, step in zip(item.shape, item.stride(), strict=True))
        return not item.numel() or item.untyped_storage().nbytes() >= (last + 1) * item.element_size()
    except Exception:
        return False
