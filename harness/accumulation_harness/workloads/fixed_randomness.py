"""A forward without its own random draws: noise, masks and times that a model draws are a constant each, whatever their shape.

So a row gets the same in whatever company, and in every format. Dropout then does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

NORMAL = 0.5  # standard deviations above the mean: a draw of 0 would leave what multiplies it without a gradient
MARK = "draws_of_its_own"  # an attribute of a model: whether a training forward makes them


def mark_draws(model: nn.Module, drawn: bool) -> None:
    """Note in a model, and so in copies of it, that its forward draws random numbers beside dropout.

    Args:
        model: The model.
        drawn: Whether it shall draw them; with False known random operations return constants.
    """
    setattr(model, MARK, drawn)


def has_draws(model: nn.Module) -> bool:
    """Whether a model is marked.

    Args:
        model: The model.

    Returns:
        True if `mark_draws` was called for it, with whatever value.
    """
    return hasattr(model, MARK)


def has_fixed_randomness(model: nn.Module) -> bool:
    """Whether it is marked and shall not draw.

    Args:
        model: Any model.

    Returns:
        True where its dropout is switched off.
    """
    return not getattr(model, MARK, True)


class FixedRandomness(TorchDispatchMode):
    """A context in which known random operations return constants; unknown ones draw as usual."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, own = func.overloadpacket.__name__, {**(kwargs or {})}
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name not in CONSTANTS:
            return func(*args, **own)
        made = func(*args, **own)
        named = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | own
        return made.copy_(torch.as_tensor(CONSTANTS[name](named)).to(made))


def _uniform(of: Mapping[str, Any]) -> float:
    return (float(of.get("from", 0.0)) + float(of.get("to", 1.0))) / 2


def _normal(of: Mapping[str, Any]) -> Any:
    mean, deviation = of.get("mean", 0.0), of.get("std", 1.0)
    return (mean if mean is not None else 0.0) + NORMAL * (deviation if deviation is not None else 1.0)


def _whole(of: Mapping[str, Any]) -> int:
    low, high = int(of.get("low", of.get("from", 0))), of.get("high", of.get("to"))
    return low if high is None else (low + int(high)) // 2


CONSTANTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "rand": lambda of: 0.5,
    "rand_like": lambda of: 0.5,
    "uniform_": _uniform,
    "randn": lambda of: NORMAL,
    "randn_like": lambda of: NORMAL,
    "normal": _normal,
    "normal_": _normal,
    "bernoulli": lambda of: of["p"] if "p" in of else of["self"],
    "bernoulli_": lambda of: of.get("p", 0.5),
    "randint": _whole,
    "randint_like": _whole,
    "random_": _whole,
    "poisson": lambda of: of["self"],
    "multinomial": lambda of: of["self"].argmax(-1, keepdim=True),
    "exponential_": lambda of: 1.0 / float(of.get("lambd", 1.0)),
}
