"""Replacing functions for a while, wherever they have been imported, and putting every one of them back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional

Wrap = Callable[..., Any]  # (original, *args, **kwargs) -> result

FUNCTIONS: dict[str, tuple[Any, str]] = {
    "backward": (torch.autograd, "backward"),
    "grad": (torch.autograd, "grad"),
    "clip_grad_norm_": (torch.nn.utils, "clip_grad_norm_"),
    "clip_grad_value_": (torch.nn.utils, "clip_grad_value_"),
    "batch_norm": (functional, "batch_norm"),
    "scaled_dot_product_attention": (functional, "scaled_dot_product_attention"),
    **{
        name: (functional, name)
        for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    },
}
METHODS: dict[str, tuple[type, str]] = {
    "add_param_group": (torch.optim.Optimizer, "add_param_group"),
    "zero_grad": (torch.optim.Optimizer, "zero_grad"),
    "schedule": (torch.optim.lr_scheduler.LRScheduler, "step"),
    "scaler_scale": (torch.amp.GradScaler, "scale"),
    "scaler_unscale": (torch.amp.GradScaler, "unscale_"),
    "scaler_step": (torch.amp.GradScaler, "step"),
    "scaler_update": (torch.amp.GradScaler, "update"),
}


class Patches:
    """Functions and methods replaced until `restore`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def methods(self, wraps: dict[str, Wrap]) -> None:
        for key, wrap in wraps.items():
            self.method(*METHODS[key], wrap)

    def method(self, owner: type, name: str, wrap: Wrap) -> None:
        original = getattr(owner, name)
        setattr(owner, name, _wrapper(original, wrap))
        self._undo.append(lambda owner=owner, name=name, original=original: setattr(owner, name, original))  # type: ignore[misc]

    def functions(self, wraps: dict[str, Wrap], namespaces: Iterable[dict[str, Any]]) -> None:
        """Also under the names by which other modules imported them (`from torch.nn.utils import clip_grad_norm_`)."""
        wrappers = {}
        for key, wrap in wraps.items():
            owner, name = FUNCTIONS[key]
            original = getattr(owner, name)
            wrappers[id(original)] = (original, _wrapper(original, wrap))
        spaces = {id(vars(module)): vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")}
        spaces |= {id(space): space for space in namespaces}
        for space in spaces.values():
            for name, value in list(space.items()):
                found = wrappers.get(id(value))
                if found is not None and value is found[0]:
                    space[name] = found[1]
                    self._undo.append(lambda space=space, name=name, value=value: space.__setitem__(name, value))  # type: ignore[misc]

    def removing(self, handle: Any) -> None:
        """Also remove this hook on `restore`."""
        self._undo.append(handle.remove)

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()


def _wrapper(original: Callable[..., Any], wrap: Wrap) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrap(original, *args, **kwargs)

    for name in (
        "__name__",
        "__qualname__",
        "__doc__",
        "__module__",
    ):  # not `functools.wraps`: it would copy `hooked` and the like
        setattr(call, name, getattr(original, name, None))
    call.__wrapped__ = original  # type: ignore[attr-defined]
    return call
