"""What of JAX, MLX and Keras draws random numbers or couples rows: taken out of a training that hands over its arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from accumulation_harness.audit.evidence import Layer, Run
from accumulation_harness.observe.patches import Place, Wrap

DRAWS = {  # function -> the number that it gives for every element; 0 where numbers are whole
    **dict.fromkeys(("bernoulli", "categorical", "gumbel", "randint", "uniform"), 0.5),
    **dict.fromkeys(("normal", "truncated_normal"), 0.0),  # what is added as noise is then gone
}
OF_DRAWS = ("jax.random", "mlx.core.random")  # modules of these functions
NORMS = {  # class of batch normalisation -> its forward
    ("flax.linen", "BatchNorm"): "__call__",
    ("flax.nnx", "BatchNorm"): "__call__",
    ("haiku", "BatchNorm"): "__call__",
    ("mlx.nn", "BatchNorm"): "__call__",
    ("keras.layers", "BatchNormalization"): "call",
}


class OtherLayers:
    """Wrappers of these functions and classes, as far as their modules are there."""

    def __init__(self, run: Run, disabled: frozenset[Layer], trains: Callable[[], bool]) -> None:
        """`trains`: whether the weights have been drawn and handed over; what is drawn before that stays."""
        self.run, self.disabled, self.trains = run, disabled, trains

    def wraps(self) -> Mapping[Place, Wrap]:
        """(module, function) or (class, method) -> its wrapper; none where nothing is to be taken out."""
        found: dict[Place, Wrap] = {}
        if Layer.dropout in self.disabled:
            modules = [sys.modules[name] for name in OF_DRAWS if name in sys.modules]
            found |= {
                (module, name): partial(self._draw, to)
                for module in modules
                for name, to in DRAWS.items()
                if hasattr(module, name)
            }
        if Layer.batch_norm in self.disabled:
            kinds = [(getattr(sys.modules.get(module), kind, None), method) for (module, kind), method in NORMS.items()]
            found |= {(kind, method): self._batch_norm for kind, method in kinds if kind is not None}
        return found

    def forget_compiled(self) -> None:
        """What JAX has traced holds what the wrappers take out, or leaves it out."""
        if self.disabled and "jax" in sys.modules:
            sys.modules["jax"].clear_caches()

    def _draw(self, number: float, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same number for every element, and true."""
        drawn = original(*args, **kwargs)
        if not self.trains():
            return drawn
        self.run.dropout_calls += 1
        return (drawn * 0 + number).astype(drawn.dtype)

    def _batch_norm(self, original: Callable[..., Any], layer: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.trains():
            return original(layer, inputs, *args, **kwargs)
        self.run.norm_calls += 1
        return inputs
