"""The layers of any model: which there are, and exchanging them in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from accumulation_harness.workloads import fixed_randomness

Old = TypeVar("Old", bound=nn.Module)
New = TypeVar("New", bound=nn.Module)


def replace_layers(model: nn.Module, kind: type[Old], make: Callable[[Old], New]) -> list[New]:
    """Put a new layer in the place of every layer of a class, in place.

    What `make` puts around a layer is not looked into again. A layer under several names is one under all of them; the model
    itself stays.

    Args:
        model: The model.
        kind: The class of the layers to replace, subclasses included.
        make: Makes the new layer from the old one.

    Returns:
        The new layers, in the order of `model.named_modules()`.
    """
    made: dict[nn.Module, New] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, kind) and name:
            parent, _, child = name.rpartition(".")
            owner = model.get_submodule(parent)
            if owner._modules[child] is layer:  # else its owner has several names, and has the new one already
                made[layer] = made[layer] if layer in made else make(layer)
                setattr(owner, child, made[layer])
    return list(made.values())


def has_batch_norm(model: nn.Module) -> bool:
    """Decide whether some layer normalises by the statistics of its batch.

    Args:
        model: The model.

    Returns:
        True if it has a BatchNorm layer of PyTorch's or of a subclass.
    """
    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def draws(model: nn.Module) -> bool:
    """Decide whether a training forward draws random numbers.

    Args:
        model: The model.

    Returns:
        True with a positive probability of dropout, or after `fixed_randomness.mark_draws`.
    """
    return fixed_randomness.has_draws(model) or any(_probabilities(layer) for layer in model.modules())


def of_two_modes(model: nn.Module) -> list[nn.Module]:
    """List the layers that compute something else in evaluation mode.

    Args:
        model: The model.

    Returns:
        BatchNorm, and layers that draw random numbers; the model itself where it draws them in its own code.
    """
    own = [model] if fixed_randomness.has_draws(model) else []
    return own + [layer for layer in model.modules() if isinstance(layer, _BatchNorm) or _probabilities(layer)]


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch a model's random draws off, in place.

    Args:
        model: The model; all its probabilities of dropout become 0.

    Returns:
        The same model.
    """
    if fixed_randomness.has_draws(model):
        fixed_randomness.mark_draws(model, False)
    for layer in model.modules():
        for name in _probabilities(layer):
            setattr(layer, name, 0.0)
    return model


def _probabilities(layer: nn.Module) -> dict[str, float]:
    """Positive probabilities of dropout by attribute: `p` of a dropout layer, else numbers with `dropout` in their names."""
    own = {"p": layer.p} if isinstance(layer, _DropoutNd) else {k: v for k, v in vars(layer).items() if "dropout" in k}
    return {name: value for name, value in own.items() if isinstance(value, float) and value > 0}


def copied(model: nn.Module) -> nn.Module:
    """Copy a model so that nothing is shared.

    What forwards have left in the layers (a normed weight, an output) is without a graph.

    Args:
        model: The model.

    Returns:
        The copy; its parameters are leaves.
    """
    left = [own for layer in model.modules() for own in tree_leaves(vars(layer)) if isinstance(own, Tensor) and not own.is_leaf]
    made = copy.deepcopy(model, {id(own): own.detach().clone() for own in left})
    for p in made.parameters():
        if not p.is_leaf:  # of a scripted model
            p.detach_().requires_grad_()
    return made


def in_format(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move a model, in place.

    Args:
        model: The model.
        device: Where it goes.
        dtype: The format of its real numbers; complex ones become pairs of it.

    Returns:
        The same model.
    """
    of_pairs = torch.complex128 if dtype == torch.float64 else torch.complex64

    def placed(tensor: Tensor) -> Tensor:
        own = dtype if tensor.is_floating_point() else of_pairs if tensor.is_complex() else tensor.dtype
        return tensor.to(device, own)

    model._apply(placed)  # `Module.to` would cut imaginary parts off
    return model


class AsComplex(nn.Module):
    """A complex parameter, kept as its real and imaginary parts: what PyTorch's optimizers make of it inside a step."""

    def forward(self, real: Tensor, imaginary: Tensor) -> Tensor:
        """The complex value of two parts."""
        return torch.complex(real, imaginary)

    def right_inverse(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of a complex value, in memory of their own."""
        return value.real.clone(), value.imag.clone()


def with_real_parameters(model: nn.Module) -> None:
    """Keep each complex parameter as real ones, in place.

    Args:
        model: Its complex parameters become real ones of shape [..., 2].

    Raises:
        ValueError: A complex parameter has several names.
    """
    places = [
        (layer, name) for layer in model.modules() for name, own in layer.named_parameters(recurse=False) if own.is_complex()
    ]
    if len(places) > sum(own.is_complex() for own in model.parameters()):
        raise ValueError("a complex parameter has several names")
    for layer, name in places:
        parametrize.register_parametrization(layer, name, AsComplex(), unsafe=True)
