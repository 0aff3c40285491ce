"""Code that narrows its numbers inside, run in float64 all the same: what it asks for in a narrower format it gets in float64.

A model may compute a softmax, a norm or its losses in float32 whatever it is given (`x.float()`, `torch.zeros(n)`). In exact
arithmetic such a cast changes nothing: widened, the code is the same function without that rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
SINGLE = (torch.float32, torch.complex64)
CASTS = {  # methods of a tensor that are casts
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "cfloat": torch.complex64,
    "chalf": torch.complex32,
}


@contextmanager
def widened(narrow: Collection[torch.dtype] = WIDE.keys()) -> Iterator[None]:
    """Compute in float64 inside, whatever code asks for.

    Casts to narrow formats and new tensors in them are float64, and so is each function's narrow input.

    Args:
        narrow: The formats that are widened.

    Yields:
        Nothing; float64 is the default format inside.
    """
    with _default_format(torch.float64), _Wider(narrow):
        yield


@contextmanager
def as_asked() -> Iterator[None]:
    """Compute inside in the formats that code asks for, although what calls it is widened.

    Yields:
        Nothing; float32 is the default format inside.
    """
    with _default_format(torch.float32), torch._C.DisableTorchFunction():
        yield


@contextmanager
def _default_format(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have this format inside."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def kept_narrow(owner: object, method: str) -> Iterator[None]:
    """Let a method run as it is although what calls it is widened.

    Args:
        owner: An object.
        method: The name of its method.

    Yields:
        Nothing.
    """
    own = vars(owner).get(method)
    vars(owner)[method] = as_asked()(getattr(owner, method))
    try:
        yield
    finally:
        if own is None:
            del vars(owner)[method]
        else:
            vars(owner)[method] = own


class _Wider(TorchFunctionMode):
    def __init__(self, narrow: Collection[torch.dtype]) -> None:
        super().__init__()
        self.wide = {dtype: WIDE[dtype] for dtype in narrow}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "view"):  # of an attribute; of bits
            return func(*args, **(kwargs or {}))
        # what is written in place stays the tensor that it is
        kept = args[:1] if name.endswith("_") and (name == "__setitem__" or not name.startswith("__")) else ()
        wide = (*kept, *tree_map(self._wide, args[len(kept) :]))
        if CASTS.get(name) in self.wide:
            return wide[0].to(self.wide[CASTS[name]])
        if name.startswith("_amp_"):
            return self._by_kernel(name, func, args)
        return func(*wide, **tree_map(self._wide, dict(kwargs or {})))

    def _by_kernel(self, name: str, func: Any, args: Sequence[Any]) -> None:
        """A loss scaler's kernel, in place, whose numbers have to be float32: what that rounds of them is taken back."""
        numbers = [one for one in args if isinstance(one, Tensor) and one.dtype == torch.float64]
        narrow = {id(one): one.float() for one in numbers}
        func(*(narrow.get(id(one), one) for one in args))
        for changed in numbers[:1]:
            changed.copy_(narrow[id(changed)])
        if name.endswith("unscale_"):
            torch._foreach_mul_(args[0], args[2] / narrow.get(id(args[2]), args[2]).double())

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self.wide.get(value, value)
        return value.to(self.wide[value.dtype]) if isinstance(value, Tensor) and value.dtype in self.wide else value


class Narrow(TorchDispatchMode):
    """Notes the operations, of forwards and backwards inside it, whose results are in a narrower format than float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []  # each once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(isinstance(one, Tensor) and one.dtype in WIDE for one in tree_leaves(made)):
            name = func.overloadpacket.__name__
            self.operations += [name] if name not in self.operations else []
        return made
