"""How the model of an arm runs in the precision under test: op by op, compiled, or captured as CUDA graphs.

Only the forward is exchanged, and with it its backward: hooks, loss, accumulation and optimizer stay those of every arm. A graph
has the addresses of its inputs, parameters and gradients built in: it gets inputs of its own, and a model that is called with
other parameters (`functional_call`) or has hooks inside runs op by op. The
float64 trajectory runs op by op always, so that L1 compares what a compiler or a graph computes with what it should.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accumulation_harness.config import ConfigError, Execution
from accumulation_harness.recipes.determinism import kept_randomness

Forward = Callable[[Tensor], Tensor]


def check_available(execution: Execution, device: torch.device) -> None:
    """Refuse CUDA graphs without a CUDA device.

    Args:
        execution: The setting.
        device: The device of the trial.

    Raises:
        ConfigError: The device cannot execute so.
    """
    if execution == Execution.cuda_graph and device.type != "cuda":
        raise ConfigError("execution", execution, f"eager or compile on device={device}")


def exchange_forward(model: nn.Module, execution: Execution) -> None:
    """Make the model's forward run eagerly, compiled, or as CUDA graphs, in place.

    Args:
        model: The model of an arm; its `forward` is replaced.
        execution: How it shall run.
    """
    match execution:
        case Execution.eager:
            pass
        case Execution.compile:
            # Sizes are symbols: arms cut windows differently, and past a limit the compiler would fall back to eager in silence.
            model.forward = torch.compile(model.forward, dynamic=True, options=_compiler_options())
        case Execution.cuda_graph:
            model.forward = Captured(model)


def _compiler_options() -> dict[str, Any] | None:
    """Reductions that are not tuned by timing, where the compiler has that choice: their order is then the same in each run."""
    from torch._inductor import config

    return {"deterministic": True} if hasattr(config, "deterministic") else None


class Captured:
    """The forward of a model as CUDA graphs, one with its backward per shape and format; op by op where no gradient is wanted."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._eager = model, model.forward
        self._parameters = list(model.parameters())
        self._inner = [layer for layer in model.modules() if layer is not model]
        self._graphs: dict[Hashable, Forward] = {}
        for parameter in model.parameters():
            parameter.register_hook(partial(_own_copy, parameter))

    def __call__(self, inputs: Tensor) -> Tensor:
        """The model's outputs for `inputs`, from the graph of their shape, captured when it is first seen."""
        if not (self._model.training and torch.is_grad_enabled()) or self._is_changed():
            return self._eager(inputs)  # type: ignore[no-any-return]
        key = (inputs.shape, inputs.dtype, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs)
        return self._graphs[key](inputs)

    def _is_changed(self) -> bool:
        """Whether the model is called with other parameters than it has, or with hooks that a replay would not call."""
        parameters = self._model.parameters()
        others = any(mine is not now for mine, now in zip(self._parameters, parameters, strict=False))
        return others or any(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks for layer in self._inner)

    def _capture(self, inputs: Tensor) -> Forward:
        """Capturing runs the model a few times: its buffers and the generators are put back."""
        static = inputs.detach().clone()  # the graph's own: every later micro-batch is copied into it
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        # Warming up runs on a stream of its own, of which torch would warn at every backward on the usual one.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        with (
            kept_randomness(inputs.device),
            torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False),  # a cached cast would not be captured
        ):
            graphed = torch.cuda.make_graphed_callables(Whole(self._model, self._eager), (static,), allow_unused_input=True)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        return graphed  # type: ignore[return-value]


class Whole(nn.Module):
    """A model under another forward and without its hooks, which a graph cannot capture."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self._run = model, forward

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of the forward given, [n, ...]."""
        return self._run(inputs)


def _own_copy(parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """A gradient that may become `.grad` itself, copied: the next replay of the graph writes to the same memory."""
    return gradient.clone() if parameter.grad is None else None
