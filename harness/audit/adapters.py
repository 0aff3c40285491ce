"""Optimizers that are not of `torch.optim` but train torch tensors: Keras' own, on its torch backend."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from harness.audit.tensors import vector

if TYPE_CHECKING:
    from harness.audit.recorder import Recorder

KERAS = "keras.src.backend.torch.optimizers.torch_parallel_optimizer"


class Foreign:
    """What the audit reads of an optimizer, in the shape of `torch.optim.Optimizer`."""

    def __init__(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        self.name = f"keras {type(optimizer).__name__}"
        self.optimizer = optimizer
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 1.0, "weight_decay": 0.0}]
        self.state: dict[Tensor, dict[str, Any]] = {}

    def averages(self) -> list[list[Tensor]]:
        """Its moving averages of the weights."""
        kept = getattr(self.optimizer, "_model_variables_moving_average", None) or []
        return [[variable.value for variable in kept]] if kept else []


class KerasAdapter:
    """Sees Keras optimizers step, through `_backend_update_step(grads, variables, learning_rate)`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.known: dict[int, Foreign] = {}
        self.patched = False

    def look(self) -> None:
        """Once Keras has been imported: wrap its step, and find the optimizers that have variables by now."""
        module = sys.modules.get(KERAS)
        if module is None or self.known:
            return
        base = module.TorchParallelOptimizer
        if not self.patched:
            self.patched = True
            self.recorder.patch(base, "_backend_update_step", self._step)
        for item in gc.get_objects():
            if issubclass(type(item), base) and getattr(item, "built", False):
                self._foreign(item, item._trainable_variables)

    def _foreign(self, optimizer: Any, variables: Sequence[Any]) -> Foreign:
        found = self.known.get(id(optimizer))
        if found is None:
            found = self.known[id(optimizer)] = Foreign(optimizer, [variable.value for variable in variables])
            self.recorder.add(found)
        return found

    def _step(self, original: Callable[..., Any], optimizer: Any, grads: Any, variables: Any, learning_rate: Any) -> Any:
        foreign = self._foreign(optimizer, variables)
        foreign.param_groups[0]["lr"] = float(learning_rate)
        live = self.recorder.add(foreign)
        live.before_step()
        given = vector(grads)
        result = original(optimizer, grads, variables, learning_rate)
        live.close(given)
        live.shadows = foreign.averages()
        self.recorder.settle(live)
        return result
