"""Where the slope of the loss is looked at: the inputs of PyTorch's loss functions, else the outputs of the watched model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.watch.slopes import class_weighted, is_transformed, log_probabilities, measured
from harness.watch.track import Head

LARGE = 1 << 20  # logits that are looked at in a sample of windows only
MOST = 4  # outputs of a model that may be logits
KEPT_OUT = ("hidden_states", "attentions", "past_key_values", "last_hidden_state")


class Heads:
    """The logits of the micro-batch under way."""

    def __init__(self) -> None:
        self.detail = True
        self.paused = False
        self._outputs: list[Head] = []
        self._losses: list[Head] = []
        self._fed = False
        self._forwards = 0  # since the last backward
        self._passed_over = False
        self.autocast: torch.dtype | None = None  # of the last forward

    def taken(self) -> tuple[Sequence[Head] | None, bool, int]:
        """Of the backward that ends: heads, None where none was looked at; whether inputs asked for gradients; forwards."""
        found: Sequence[Head] | None = self._losses or self._outputs
        if not found and self._passed_over:
            found = None
        fed = self._fed
        self._outputs, self._losses, self._fed, self._passed_over = [], [], False, False
        return found, fed, self.forgotten()

    def forgotten(self) -> int:
        """Forwards that no backward has followed, from now on counted anew."""
        forwards, self._forwards = self._forwards, 0
        return forwards

    def see(self, args: Any, kwargs: Any, output: Any) -> None:
        """A forward of the model in training mode."""
        if self.paused:
            return
        self._forwards += 1
        kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
        self.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._fed = self._fed or any(isinstance(t, Tensor) and t.requires_grad for t in (*args, *kwargs.values()))
        for z in list(_logits(output))[:MOST]:
            self._hook(z, self._outputs, lambda z, g: measured(z, g))

    def functions(self) -> Mapping[tuple[Any, str], Callable[..., Any]]:
        """The loss functions, and their wrappers."""
        return {
            (functional, "cross_entropy"): self._cross_entropy,
            (functional, "nll_loss"): self._nll_loss,
            (functional, "mse_loss"): self._mse_loss,
        }

    def _cross_entropy(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not self.paused:
            names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            target, weight = given.get("target"), given.get("weight")
            ignore, smoothing = given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
            z = given.get("input")
            if isinstance(target, Tensor) and not target.is_floating_point() and isinstance(z, Tensor) and z.dim() > 1:
                self._hook(z, self._losses, lambda z, g: class_weighted(z, g, target, weight, ignore, smoothing))
        return original(*args, **kwargs)

    def _nll_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not self.paused:
            given = {**dict(zip(("input", "target", "weight"), args, strict=False)), **kwargs}
            z, target = given.get("input"), given.get("target")
            ignore = given.get("ignore_index", args[4] if len(args) > 4 else -100)
            if isinstance(z, Tensor) and isinstance(target, Tensor) and z.dim() == 2 and given.get("weight") is None:
                self._hook(z, self._losses, lambda z, g: log_probabilities(z, g, target, ignore))
        return original(*args, **kwargs)

    def _mse_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not self.paused:
            given = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
            z, target = given.get("input"), given.get("target")
            if isinstance(z, Tensor) and isinstance(target, Tensor) and not target.requires_grad:
                self._hook(z, self._losses, lambda z, g: measured(z, g, target))
        return original(*args, **kwargs)

    def _hook(self, z: Tensor, kept: list[Head], measure: Callable[[Tensor, Tensor], Mapping[str, Tensor]]) -> None:
        if not z.requires_grad or not torch.is_grad_enabled() or z.is_leaf or is_transformed(z):
            return
        if z.numel() > LARGE and not self.detail:
            self._passed_over = True
            return
        logits, rows = z.detach(), z.shape[0] if z.dim() else 1

        def look(g: Tensor) -> None:
            if not self.paused and (numbers := measure(logits, g.detach())):
                kept_now = self._losses if kept_is_loss else self._outputs
                kept_now.append(Head(numbers=numbers, rows=rows, dtype=_narrower(g.dtype, logits.dtype)))

        kept_is_loss = kept is self._losses
        z.register_hook(look)


def _logits(output: Any) -> Iterator[Tensor]:
    """The tensors of an output that may be logits."""
    if isinstance(output, Tensor):
        if output.dim() and output.is_floating_point() and output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        if isinstance(output.get("logits"), Tensor):
            yield from _logits(output["logits"])
        else:
            for name, value in output.items():
                if name not in KEPT_OUT:
                    yield from _logits(value)
    elif isinstance(output, (tuple, list)):
        for value in output[:MOST]:
            if isinstance(value, Tensor):
                yield from _logits(value)
    elif dataclasses.is_dataclass(output):
        for each in dataclasses.fields(output):
            value = getattr(output, each.name)
            if isinstance(value, Tensor) and each.name not in KEPT_OUT:
                yield from _logits(value)


def _narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if torch.finfo(one).eps >= torch.finfo(other).eps else other
