"""A rank's own gradients of parameters that ranks share out: FSDP puts whole tensors in their place while a module runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from harness.audit.evidence import Vector
from harness.audit.observe.tensors import dense, vector


class Unsharded:
    """The whole tensors that modules used since the last backward, and what it gave them before ranks were averaged."""

    def __init__(self) -> None:
        self.names: dict[int, list[tuple[str, int]]] = {}  # module -> names of its parameters and their identities
        self.clear()

    def clear(self) -> None:
        for handle in getattr(self, "handles", ()):
            handle.remove()
        self.handles: list[Any] = []
        self.hooked: set[int] = set()
        self.parts: dict[int, Tensor] = {}

    def know(self, model: nn.Module) -> None:
        """Before a model's first forward, when its modules still hold what the optimizer holds."""
        for module in model.modules():
            own = [(name, id(p)) for name, p in module._parameters.items() if p is not None]
            self.names.setdefault(id(module), own)

    def see(self, module: nn.Module) -> None:
        """At the end of a module's forward, before its tensors are given back."""
        for name, key in self.names.get(id(module), ()):
            used = getattr(module, name, None)
            if isinstance(used, Tensor) and id(used) not in {key, *self.hooked} and used.requires_grad:
                self.hooked.add(id(used))
                self.handles.append(used.register_hook(functools.partial(self._add, key)))

    def _add(self, key: int, gradient: Tensor) -> None:
        part = dense(gradient).double()
        self.parts[key] = self.parts[key] + part if key in self.parts else part.clone()

    def taken(self, parameters: Sequence[Tensor]) -> Vector | None:
        """In the order of the parameters, each whole; None unless all of them were reached."""
        found = [self.parts.get(id(p)) for p in parameters]
        return None if any(part is None for part in found) or not found else vector(part for part in found if part is not None)
