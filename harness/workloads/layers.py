"""The layers of any model: which there are, and exchanging them in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

Old = TypeVar("Old", bound=nn.Module)
New = TypeVar("New", bound=nn.Module)


def replace_layers(model: nn.Module, kind: type[Old], make: Callable[[Old], New]) -> list[New]:
    """Put `make(layer)` in the place of every layer of `kind`; the new layers in the order of `model.named_modules()`.

    What `make` puts around a layer is not looked into again. A layer under several names, and the model itself, stay.
    """
    layers = []
    for name, layer in list(model.named_modules()):
        if isinstance(layer, kind):
            parent, _, child = name.rpartition(".")
            layers.append(make(layer))
            setattr(model.get_submodule(parent), child, layers[-1])
    return layers


def has_batch_norm(model: nn.Module) -> bool:
    """Whether some layer normalises by the statistics of its batch."""
    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def draws(model: nn.Module) -> bool:
    """Whether a training forward draws random numbers for dropout."""
    return any(_probabilities(layer) for layer in model.modules())


def without_dropout(model: nn.Module) -> nn.Module:
    """The model, with all its probabilities of dropout at 0."""
    for layer in model.modules():
        for name in _probabilities(layer):
            setattr(layer, name, 0.0)
    return model


def _probabilities(layer: nn.Module) -> dict[str, float]:
    """Positive probabilities of dropout by attribute: `p` of a dropout layer, else numbers with `dropout` in their names."""
    own = {"p": layer.p} if isinstance(layer, _DropoutNd) else {k: v for k, v in vars(layer).items() if "dropout" in k}
    return {name: value for name, value in own.items() if isinstance(value, float) and value > 0}
