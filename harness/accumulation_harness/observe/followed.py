"""The parameters of one optimizer, followed through its groups, and whether what they hold was written to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

Mark = tuple[int, int]
Options = dict[str, tuple[float, ...]]


class Followed:
    """One optimizer, or what has its `param_groups`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.parameters: list[Tensor] = []
        self.num_steps = 0  # that were taken, or left out

    def look_again(self) -> bool:
        """Whether the parameters are others than at the last look: frameworks replace them when they shard or move a model."""
        found = self.now()
        is_new = list(map(id, found)) != list(map(id, self.parameters))
        self.parameters = found
        return is_new

    def now(self) -> list[Tensor]:
        """The parameters that are followed, as they are now."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of them is a parameter that is followed."""
        return not set(map(id, tensors)).isdisjoint(map(id, self.parameters))

    def before_clip(self) -> Any:
        """Its gradients are about to be clipped; what is returned is handed on when they have been."""

    def unscaled(self) -> None:
        """The loss scale was taken out of its gradients."""

    @property
    def lrs(self) -> tuple[float, ...]:
        """Learning rates now, one per parameter group."""
        return tuple(float(group.get("lr", 1.0)) for group in self.optimizer.param_groups)

    @property
    def options(self) -> Options:
        """The other numbers of the parameter groups by name (`weight_decay`, `betas[0]`), one per group that has it."""
        found: Options = {}
        for group in self.optimizer.param_groups:
            for name, value in group.items():
                several = enumerate(value) if isinstance(value, (tuple, list)) and name != "params" else ()
                each = [(f"{name}[{place}]", one) for place, one in several] or [(name, value)]
                for path, one in each if name != "lr" else ():
                    if type(one) in (int, float):
                        found[path] = (*found.get(path, ()), float(one))
        return found


def mark(gradient: Tensor | None) -> Mark:
    """Note which tensor a gradient is and how often it was written to, of a sharded one the shard behind it.

    Args:
        gradient: A `.grad`.

    Returns:
        Two marks are equal if the gradient was neither exchanged nor written to in between; (0, 0) of None.
    """
    held = getattr(gradient, "_local_tensor", gradient)
    return (0, 0) if held is None else (id(held), held._version)


def versions(tensors: Sequence[Tensor]) -> int:
    """Count the writes to tensors, without calling code of a subclass of Tensor.

    Args:
        tensors: The tensors; writes to tensors of inference mode are not counted by PyTorch.

    Returns:
        The sum of their version counters: it has grown if one was written to in place.
    """
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return sum(map(attrgetter("_version"), tensors))
        except RuntimeError:  # of a tensor of inference, whose writes are not counted
            return sum(t._version for t in tensors if not t.is_inference())
