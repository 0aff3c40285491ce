"""What of other frameworks draws random numbers or couples rows: taken out of a training that hands over its arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from accumulation_harness.audit.evidence import Layer, Run
from accumulation_harness.observe.patches import Place, Wrap

DRAWS = {  # function -> the number that it gives for every element; 0 where numbers are whole
    **dict.fromkeys(("bernoulli", "categorical", "gumbel", "integers", "randint", "random", "uniform", "stateless_uniform"), 0.5),
    **dict.fromkeys(("rand", "random_sample"), 0.5),
    # what is added as noise is then gone
    **dict.fromkeys(("normal", "standard_normal", "truncated_normal", "stateless_normal", "stateless_truncated_normal"), 0.0),
    "randn": 0.0,
    "binomial": 1.0,  # a mask of it leaves all
}
OF_DRAWS = ("jax.random", "mlx.core.random", "numpy.random", "tensorflow.random")  # modules of these functions
DROPS = ("Dropout", *(f"SpatialDropout{k}D" for k in (1, 2, 3)), "AlphaDropout", "GaussianDropout", "GaussianNoise")  # of Keras
NORMS = {  # class of batch normalisation -> its forward
    ("flax.linen", "BatchNorm"): "__call__",
    ("flax.nnx", "BatchNorm"): "__call__",
    ("haiku", "BatchNorm"): "__call__",
    ("mlx.nn", "BatchNorm"): "__call__",
    ("keras.layers", "BatchNormalization"): "call",
}


class _Even:
    """A generator of NumPy's, whose draws are `draw`'s."""

    def __init__(self, own: Any, draw: Callable[..., Any]) -> None:
        self._own, self._draw = own, draw

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._own, name)
        return partial(self._draw, DRAWS[name], method) if name in DRAWS else method


class OtherLayers:
    """Wrappers of these functions and classes, as far as their modules are there."""

    def __init__(self, run: Run, disabled: frozenset[Layer], trains: Callable[[], bool]) -> None:
        """`trains`: whether the weights have been drawn and handed over; what is drawn before that stays."""
        self.run, self.disabled, self.trains = run, disabled, trains

    def wraps(self) -> Mapping[Place, Wrap]:
        """(module, function) or (class, method) -> its wrapper; none where nothing is to be taken out."""
        found: dict[Place, Wrap] = {}
        if "dropout" in self.disabled:
            modules = [sys.modules[name] for name in OF_DRAWS if name in sys.modules]
            found |= {
                (module, name): partial(self._draw, to)
                for module in modules
                for name, to in DRAWS.items()
                if hasattr(module, name)
            }
            for kind in ("default_rng", "RandomState"):
                found[np.random, kind] = lambda original, *given, **named: _Even(original(*given, **named), self._draw)
            keras = sys.modules.get("keras.layers")  # on TensorFlow one compiled operation draws and drops
            found |= {(getattr(keras, kind), "call"): self._drop for kind in DROPS if keras is not None}
        if "batch_norm" in self.disabled:
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
        even = drawn * 0 + number
        if hasattr(even, "astype"):
            return even.astype(drawn.dtype)
        return int(even) if type(drawn) is int else even

    def _drop(self, original: Callable[..., Any], layer: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.trains():
            return original(layer, inputs, *args, **kwargs)
        self.run.dropout_calls += 1
        return inputs

    def _batch_norm(self, original: Callable[..., Any], layer: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.trains():
            return original(layer, inputs, *args, **kwargs)
        self.run.norm_calls += 1
        return inputs + 0 * original(layer, inputs, *args, **kwargs)  # its weights have a gradient, of zeros
