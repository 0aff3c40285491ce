"""A rank's own gradients, seen before a wrapper averages them over ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accumulation_harness.audit.evidence import Vector
from accumulation_harness.audit.observe.tensors import dense, vector
from accumulation_harness.observe.fence import Fence


class Sums:
    """What hooked tensors were given, added up in float64."""

    def __init__(self, fence: Fence) -> None:
        self.fence = fence
        self.parts: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def hook(self, tensor: Tensor, key: int, *, first: bool = False) -> None:
        """Add what the tensor is given from now on to the part `key`; `first`: before other hooks have changed it."""
        others = dict(tensor._backward_hooks or {})
        self._handles.append(tensor.register_hook(self.fence.hook(functools.partial(self._add, key))))
        if first and others and tensor._backward_hooks is not None:  # hooks are called in the order in which they lie there
            for earlier in others:
                tensor._backward_hooks[earlier] = tensor._backward_hooks.pop(earlier)

    def _add(self, key: int, gradient: Tensor) -> None:
        part = dense(gradient).double()
        self.parts[key] = self.parts[key] + part if key in self.parts else part.clone()

    def stop(self) -> None:
        """Look no longer; what was given so far stays."""
        for handle in self._handles:
            handle.remove()


def are_hooked(parameters: Sequence[Tensor]) -> bool:
    """Whether the run has hooks of its own on some of these parameters, which may change what they are given.

    Args:
        parameters: Parameters of the model.

    Returns:
        True where one has a hook.
    """
    plain = [p for p in parameters if type(p) in (Tensor, nn.Parameter)]
    return any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in plain)


class LocalGradients:
    """The gradients of whole parameters in one backward."""

    def __init__(self, parameters: Sequence[Tensor], fence: Fence, *, first: bool = False) -> None:
        """`first`: before other hooks on the parameters have changed them."""
        self.parameters, self._sums = parameters, Sums(fence)
        for p in parameters:
            if p.requires_grad and not hasattr(p, "full_tensor"):
                self._sums.hook(p, id(p), first=first)

    def taken(self) -> Vector | None:
        """[P]; None when no parameter was reached. Stops looking."""
        self._sums.stop()
        parts = self._sums.parts
        return vector(parts.get(id(p), torch.zeros_like(p)) for p in self.parameters) if parts else None

    @property
    def is_whole(self) -> bool:
        """Whether the place of each is known: one that an engine empties between forwards has the size of its gradient."""
        return all(p.numel() or id(p) in self._sums.parts for p in self.parameters)


class Unsharded:
    """The gradients of parameters that ranks share out: FSDP puts whole tensors in their place while a module runs."""

    def __init__(self, fence: Fence) -> None:
        self.names: dict[int, list[tuple[str, int]]] = {}  # module -> names of its parameters and their identities
        self._sums, self._hooked = Sums(fence), set[int]()

    def clear(self) -> None:
        """Forget what modules used since the last backward, and what it gave them."""
        self._sums.stop()
        self._sums, self._hooked = Sums(self._sums.fence), set()

    def know(self, model: nn.Module) -> None:
        """Before a model's first forward, when its modules still hold what the optimizer holds."""
        for module in model.modules():
            own = [(name, id(p)) for name, p in module._parameters.items() if p is not None]
            self.names.setdefault(id(module), own)

    def see(self, module: nn.Module) -> None:
        """At the end of a module's forward, before its tensors are given back."""
        for name, key in self.names.get(id(module), ()):
            used = getattr(module, name, None)
            if isinstance(used, Tensor) and id(used) not in {key, *self._hooked} and used.requires_grad:
                self._hooked.add(id(used))
                self._sums.hook(used, key)

    def taken(self, parameters: Sequence[Tensor]) -> Vector | None:
        """In the order of the parameters, each whole; None unless all of them were reached."""
        found = [self._sums.parts.get(id(p)) for p in parameters]
        return None if any(part is None for part in found) or not found else vector(part for part in found if part is not None)
