"""What is not a `torch.optim` optimizer: those of Keras (torch backend) and of fastai, and weights that are handed over."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from harness.audit.evidence import Step, Track, Vector
from harness.audit.observe.shadows import Shadow
from harness.audit.observe.tensors import gradients, vector

if TYPE_CHECKING:
    from harness.audit.observe.recorder import Recorder

HANDED = "weights handed over"
KERAS = "keras.src.backend.torch.optimizers.torch_parallel_optimizer"
FASTAI = "fastai.optimizer"


class Foreign:
    """What the audit reads of an optimizer, in the shape of `torch.optim.Optimizer`."""

    def __init__(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        self.name = f"{type(optimizer).__module__.partition('.')[0]} {type(optimizer).__name__}"
        self.optimizer = optimizer
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 1.0, "weight_decay": 0.0}]
        self.state: Mapping[Tensor, dict[str, Any]] = {}

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
        live.shadows = [Shadow(0, kept) for kept in foreign.averages()]
        self.recorder.settle(live)
        return result


class FastaiAdapter:
    """Sees fastai's own optimizers (`fastai.optimizer.Optimizer`) as they are made and as they step."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.known: dict[int, Foreign] = {}
        self.patched = False

    def look(self) -> None:
        """Once fastai has been imported: wrap its optimizer, and find those made before."""
        module = sys.modules.get(FASTAI)
        if module is None or self.patched or not hasattr(module, "Optimizer"):
            return
        self.patched = True
        self.recorder.patch(module.Optimizer, "__init__", self._init)
        self.recorder.patch(module.Optimizer, "step", self._step)

    def look_back(self) -> None:
        """Find the optimizers that were made before anybody looked."""
        if self.patched and not self.known:
            base = sys.modules[FASTAI].Optimizer
            for item in gc.get_objects():
                if issubclass(type(item), base) and hasattr(item, "param_lists"):
                    self._foreign(item)

    def _foreign(self, optimizer: Any) -> Foreign:
        found = self.known.get(id(optimizer))
        if found is None:
            parameters = [p for group in optimizer.param_lists for p in group]
            found = self.known[id(optimizer)] = Foreign(optimizer, parameters)
            self.recorder.add(found)
        first = optimizer.hypers[0]
        found.param_groups[0] |= {"lr": first.get("lr", 1.0), "weight_decay": first.get("wd") or 0.0}
        found.state = optimizer.state
        return found

    def _init(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._foreign(optimizer)

    def _step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        live = self.recorder.add(self._foreign(optimizer))
        live.before_step()
        result = original(optimizer, *args, **kwargs)
        live.close(gradients(live.parameters))
        self.recorder.settle(live)
        return result


class HandedWeights:
    """Makes a `Track` of snapshots; the update, with its sign turned, stands for the gradient."""

    def __init__(self) -> None:
        self.track = Track(name=HANDED, tensors=())
        self.last: Vector | None = None

    def take(self, weights: Mapping[str, Any]) -> None:
        """Copy the weights, in any order of the names. Raises ValueError when there are none, or others than before."""
        arrays = {str(name): np.asarray(value, dtype=np.float64).reshape(-1) for name, value in sorted(weights.items())}
        tensors = tuple((name, array.size) for name, array in arrays.items())
        if not tensors:
            raise ValueError("expected named weights, got none")
        if self.track.tensors and tensors != self.track.tensors:
            raise ValueError(f"expected the same named weights each time, {self.track.tensors[:8]}, got {tensors[:8]}")
        now = np.concatenate(list(arrays.values()))
        if self.last is not None:
            self.track.steps.append(_step(tensors, self.last, now))
        self.track.tensors, self.last = tensors, now


def _step(tensors: tuple[tuple[str, int], ...], before: Vector, after: Vector) -> Step:
    return Step(
        tensors=tensors,
        total=None,
        spread=0.0,
        gradient=before - after,
        lrs=(),
        decays=(),
        before=before,
        after=after,
        state={},
        state_step=None,
        moved=None,
        skipped=False,
        backwards=(),
        clips=(),
        calls=(),
    )
