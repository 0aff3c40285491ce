"""What is known of a tensor before anything is done with it; and whether ranks train together."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

OF_TENSORS = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


def is_plain(tensor: Any) -> TypeGuard[Tensor]:
    """Decide whether operations on a tensor mean what PyTorch says.

    Args:
        tensor: Any object.

    Returns:
        True of a tensor with numbers in memory, of PyTorch's own classes or of one that adds no behaviour to them.
    """
    kind: Any = type(tensor)
    return _adds_nothing(kind) and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def is_known(tensor: Any) -> TypeGuard[Tensor]:
    """Decide whether a tensor is plain or a DTensor; of all others operations may raise, or mean something else.

    Args:
        tensor: Any object.

    Returns:
        True if it is.
    """
    return is_plain(tensor) or (isinstance(tensor, Tensor) and hasattr(tensor, "to_local"))


def is_result(tensor: Any) -> TypeGuard[Tensor]:
    """Decide whether a tensor is plain, or the result of a collective that nobody has waited for yet.

    Args:
        tensor: Any object.

    Returns:
        True if it is.
    """
    return is_plain(tensor) or (isinstance(tensor, Tensor) and hasattr(tensor, "trigger_wait"))


@cache
def _adds_nothing(kind: Any) -> bool:
    if not issubclass(kind, Tensor) or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__) in OF_TENSORS


def is_transformed(tensor: Tensor) -> bool:
    """Decide whether a tensor is inside one of `torch.func`'s transforms, where numbers cannot be taken out.

    Args:
        tensor: Any tensor.

    Returns:
        True if it is.
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def in_a_group() -> bool:
    """Whether several ranks of `torch.distributed` train together.

    Returns:
        True with a process group of more than one rank.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
