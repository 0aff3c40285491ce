"""Layers that see more than their own sample, or draw random numbers: counted, and disabled where the intervention says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn import functional

from accumulation_harness.audit.evidence import Layer, Run
from accumulation_harness.audit.observe.patches import Place, Wrap

RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)  # they drop out between their layers, in one operation
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class Layers:
    """Wrappers of dropout, attention and batch normalisation."""

    def __init__(self, run: Run, disabled: frozenset[str]) -> None:
        self.run, self.disabled = run, disabled

    def methods(self) -> Mapping[Place, Wrap]:
        """(class, method) -> its wrapper."""
        return {(kind, "forward"): self._recurrent for kind in RECURRENT}

    def functions(self) -> Mapping[Place, Wrap]:
        """Function -> its wrapper."""
        return {
            (functional, "batch_norm"): self._batch_norm,
            (functional, "scaled_dot_product_attention"): self._attention,
            **{(functional, name): self._dropout for name in DROPOUTS},
        }

    def _dropout(
        self, original: Callable[..., Any], input: Any, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        if training and p > 0:
            self.run.dropout_calls += 1
            if Layer.dropout in self.disabled:
                return input
        return original(input, p, training, *args, **kwargs)

    def _recurrent(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        p = module.dropout
        if not (module.training and p > 0 and module.num_layers > 1):
            return original(module, *args, **kwargs)
        self.run.dropout_calls += 1
        try:
            module.dropout = 0.0 if Layer.dropout in self.disabled else p
            return original(module, *args, **kwargs)
        finally:
            module.dropout = p

    def _attention(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        listed = list(args)
        p = listed[4] if len(listed) > 4 else kwargs.get("dropout_p", 0.0)
        if p > 0:
            self.run.dropout_calls += 1
            if Layer.dropout in self.disabled:
                if len(listed) > 4:
                    listed[4] = 0.0
                else:
                    kwargs["dropout_p"] = 0.0
        return original(*listed, **kwargs)

    def _batch_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("training"):
            self.run.norm_calls += 1
            if Layer.batch_norm in self.disabled:
                return original(**_with_fixed_statistics(given))
        return original(*args, **kwargs)


def _with_fixed_statistics(given: dict[str, Any]) -> dict[str, Any]:
    channels = given["input"].shape[1]
    fixed = {**given, "training": False}
    if given.get("running_mean") is None:
        fixed["running_mean"] = given["input"].new_zeros(channels)
        fixed["running_var"] = given["input"].new_ones(channels)
    return fixed
