"""Layers that couple samples or draw random numbers, counted and disabled; and operations that round once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from accumulation_harness.audit.evidence import Run
from accumulation_harness.observe.patches import Place, Wrap


class RoundedOnce(TorchDispatchMode):
    """Context in which sums over many positions carry no rounding of their own.

    Moving weights by a rounding does not show that rounding: a sum of many equal numbers errs the same way again. Done as ever is
    what writes into its arguments, shares memory with them, draws random numbers, is told the type of its result, is no operation
    of torch's own (collectives), or has no kernel in double precision.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = (args, kwargs or {})
        shared = any(argument.alias_info is not None for argument in func._schema.arguments)
        other = func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags
        if shared or other or given[1].get("dtype") is not None or not _all_float32(given):
            return func(*args, **given[1])
        wide_args, wide_kwargs = _converted(given, torch.float32, torch.float64)
        try:
            return _converted(func(*wide_args, **wide_kwargs), torch.float64, torch.float32)
        except (RuntimeError, TypeError):
            return func(*args, **given[1])


def _all_float32(values: Any) -> bool:
    """Whether some floating tensors are given, all of them plain ones in float32."""
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, values)
    floating = [t for t in found if t.is_floating_point()]
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and not t.is_meta for t in found)
    return bool(floating) and plain and all(t.dtype == torch.float32 for t in floating)


def _converted(values: Any, of: torch.dtype, to: torch.dtype) -> Any:
    convert: Callable[[Tensor], Tensor] = lambda t: t.to(to) if t.dtype == of else t  # noqa: E731
    return tree_map_only(Tensor, convert, values)


RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)  # they drop out between their layers, in one operation
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
OF_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


class Layers:
    """Wrappers of dropout, attention and batch normalisation."""

    def __init__(self, run: Run, disabled: frozenset[str]) -> None:
        self.run, self.disabled = run, disabled

    def wraps(self) -> Mapping[Place, Wrap]:
        """(class, method) or (module, function) -> its wrapper."""
        return {
            **{(kind, "forward"): self._recurrent for kind in RECURRENT},
            (functional, "batch_norm"): self._batch_norm,
            (functional, "scaled_dot_product_attention"): self._attention,
            **{(functional, name): self._dropout for name in DROPOUTS},
        }

    def _dropout(
        self, original: Callable[..., Any], input: Any, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        if training and p > 0:
            self.run.dropout_calls += 1
            if "dropout" in self.disabled:
                return input
        return original(input, p, training, *args, **kwargs)

    def _recurrent(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        p = module.dropout
        if not (module.training and p > 0 and module.num_layers > 1):
            return original(module, *args, **kwargs)
        self.run.dropout_calls += 1
        try:
            module.dropout = 0.0 if "dropout" in self.disabled else p
            return original(module, *args, **kwargs)
        finally:
            module.dropout = p

    def _attention(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(OF_ATTENTION, args, strict=False)), **kwargs}
        if given.get("dropout_p", 0.0) > 0:
            self.run.dropout_calls += 1
            if "dropout" in self.disabled:
                return original(**{**given, "dropout_p": 0.0})
        return original(*args, **kwargs)

    def _batch_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(OF_NORM, args, strict=False)), **kwargs}
        if given.get("training"):
            self.run.norm_calls += 1
            if "batch_norm" in self.disabled:
                return original(**_with_fixed_statistics(given))
        return original(*args, **kwargs)


def _with_fixed_statistics(given: dict[str, Any]) -> dict[str, Any]:
    channels = given["input"].shape[1]
    fixed = {**given, "training": False}
    if given.get("running_mean") is None:
        fixed["running_mean"] = given["input"].new_zeros(channels)
        fixed["running_var"] = given["input"].new_ones(channels)
    return fixed
