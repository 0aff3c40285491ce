"""Exchanging the layers of a model, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

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
