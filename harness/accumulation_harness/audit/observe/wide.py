"""Float32 arithmetic whose operations round once: each is done in double precision, and its result rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class RoundedOnce(TorchDispatchMode):
    """Context in which sums over many positions carry no rounding of their own.

    Moving weights by a rounding does not show that rounding: a sum of many equal numbers errs the same way again. Done as ever is
    what writes into its arguments, shares memory with them, draws random numbers, is told the type of its result, is no operation
    of torch's own (collectives), or has no kernel in double precision.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = (args, kwargs or {})
        shared = any(argument.alias_info is not None for argument in func._schema.arguments)
        other = func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags
        if shared or other or given[1].get("dtype") is not None or not _all_float32(given):
            return func(*args, **given[1])
        wide_args, wide_kwargs = _converted(given, torch.float32, torch.float64)
        try:
            return _converted(func(*wide_args, **wide_kwargs), torch.float64, torch.float32)
        except (RuntimeError, TypeError):
            return func(*args, **given[1])


def _all_float32(values: Any) -> bool:
    """Whether some floating tensors are given, all of them plain ones in float32."""
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, values)
    floating = [t for t in found if t.is_floating_point()]
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and not t.is_meta for t in found)
    return bool(floating) and plain and all(t.dtype == torch.float32 for t in floating)


def _converted(values: Any, of: torch.dtype, to: torch.dtype) -> Any:
    convert: Callable[[Tensor], Tensor] = lambda t: t.to(to) if t.dtype == of else t  # noqa: E731
    return tree_map_only(Tensor, convert, values)
