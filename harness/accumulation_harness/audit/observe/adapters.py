"""Optimizers of Keras (torch backend) and of fastai, which fire no hook of torch: found and wrapped once they are imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accumulation_harness.audit.observe.live import Foreign
from accumulation_harness.audit.observe.observed import Observed
from accumulation_harness.observe.fence import See, Seeing
from accumulation_harness.observe.patches import Place

KERAS, KERAS_BASE = "keras.src.backend.torch.optimizers.torch_parallel_optimizer", "keras.src.optimizers.base_optimizer"
FASTAI = "fastai.optimizer"
Patch = Callable[[Mapping[Place, See]], None]  # sees methods until the end of the run


class KerasAdapter:
    """Sees Keras optimizers step, through `_backend_update_step(grads, variables, learning_rate)`."""

    def __init__(self, observed: Observed, patch: Patch, count: Callable[[], None]) -> None:
        """`count` is called at every step, and ends a run that has taken enough of them."""
        self.observed, self.patch, self.count = observed, patch, count
        self.known: dict[int, Foreign] = {}
        self.patched = False

    def look(self) -> None:
        """Once Keras has been imported: wrap its step, and find the optimizers that have variables by now."""
        module = sys.modules.get(KERAS)
        if module is None or self.patched:
            return
        base = module.TorchParallelOptimizer
        self.patched = True
        self.patch({(base, "_backend_update_step"): self._step, (sys.modules[KERAS_BASE].BaseOptimizer, "build"): self._build})
        for item in alive():
            if issubclass(type(item), base) and getattr(item, "built", False):
                self.observed.found.add(id(self._foreign(item, item._trainable_variables)))

    def _foreign(self, optimizer: Any, variables: Sequence[Any]) -> Foreign:
        found = self.known.get(id(optimizer))
        if found is None:
            found = self.known[id(optimizer)] = Foreign(optimizer, [variable.value for variable in variables])
            self.observed.add(found)
        return found

    def _build(self, optimizer: Any, variables: Sequence[Any], *_: Any, **__: Any) -> Seeing:
        """An optimizer gets its variables: it is seen from its first window on, whatever an earlier run has left behind."""
        yield
        self._foreign(optimizer, variables)

    def _step(self, optimizer: Any, grads: Any, variables: Any, learning_rate: Any) -> Seeing:
        foreign = self._foreign(optimizer, variables)
        foreign.param_groups[0]["lr"] = float(getattr(learning_rate, "value", learning_rate))  # a variable before Keras 3.5
        live = self.observed.add(foreign)
        self.count()
        live.before_step()
        given = live.sample.take(grads)
        yield
        live.close(given)
        self.observed.settle(live)


class FastaiAdapter:
    """Sees fastai's own optimizers (`fastai.optimizer.Optimizer`) as they are made and as they step."""

    def __init__(self, observed: Observed, patch: Patch, count: Callable[[], None]) -> None:
        """`count` is called at every step, and ends a run that has taken enough of them."""
        self.observed, self.patch, self.count = observed, patch, count
        self.known: dict[int, Foreign] = {}
        self.patched = False

    def look(self) -> None:
        """Once fastai has been imported: wrap its optimizer, and find those made before."""
        module = sys.modules.get(FASTAI)
        if module is None or self.patched or not hasattr(module, "Optimizer"):
            return
        self.patched = True
        self.patch({(module.Optimizer, "__init__"): self._init, (module.Optimizer, "step"): self._step})

    def look_back(self) -> None:
        """Find the optimizers that were made before anybody looked."""
        if self.patched and not self.known:
            base = sys.modules[FASTAI].Optimizer
            for item in alive():
                if issubclass(type(item), base) and hasattr(item, "param_lists"):
                    self._foreign(item)

    def _foreign(self, optimizer: Any) -> Foreign:
        found = self.known.get(id(optimizer))
        if found is None:
            parameters = [p for group in optimizer.param_lists for p in group]
            found = self.known[id(optimizer)] = Foreign(optimizer, parameters)
            self.observed.add(found)
        first = optimizer.hypers[0]
        found.param_groups[0] |= {"lr": first.get("lr", 1.0), "weight_decay": first.get("wd") or 0.0}
        found.state = optimizer.state
        return found

    def _init(self, optimizer: Any, *_: Any, **__: Any) -> Seeing:
        yield
        self._foreign(optimizer)

    def _step(self, optimizer: Any, *_: Any, **__: Any) -> Seeing:
        live = self.observed.add(self._foreign(optimizer))
        self.count()
        live.before_step()
        yield
        live.close(live.gradients())
        self.observed.settle(live)


def alive() -> list[Any]:
    """List all objects that are alive after a garbage collection, so that leftovers of an earlier run do not count.

    Returns:
        Objects that the garbage collector knows.
    """
    gc.collect()
    return gc.get_objects()
