"""How the model of an arm runs in the precision under test: op by op, compiled, or captured as CUDA graphs.

Only the forward is exchanged, and with it its backward: hooks, loss, accumulation and optimizer stay those of every arm. The
float64 trajectory runs op by op always, so that L1 compares what a compiler or a graph computes with what it should.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor, nn

from harness.config import ConfigError, Execution

Forward = Callable[[Tensor], Tensor]


def check_available(execution: Execution, device: torch.device) -> None:
    """Raise `ConfigError` for CUDA graphs without a CUDA device."""
    if execution == Execution.cuda_graph and device.type != "cuda":
        raise ConfigError("execution", execution, f"eager or compile on device={device}")


def exchange_forward(model: nn.Module, execution: Execution) -> None:
    """Make the model's forward run as `execution` says, in place."""
    match execution:
        case Execution.eager:
            pass
        case Execution.compile:
            # Sizes are symbols: arms cut windows differently, and past a limit the compiler would fall back to eager in silence.
            model.forward = torch.compile(model.forward, dynamic=True)
        case Execution.cuda_graph:
            model.forward = Captured(model)


class Captured:
    """The forward of a model as CUDA graphs, one with its backward per shape and format; op by op where no gradient is wanted."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._eager = model, model.forward
        self._graphs: dict[Hashable, Forward] = {}
        for parameter in model.parameters():
            parameter.register_hook(partial(own_copy, parameter))

    def __call__(self, inputs: Tensor) -> Tensor:
        """The model's outputs for `inputs`, from the graph of their shape, captured when it is first seen."""
        if not (self._model.training and torch.is_grad_enabled()):
            return self._eager(inputs)  # type: ignore[no-any-return]
        key = (inputs.shape, inputs.dtype, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs)
        return self._graphs[key](inputs)

    def _capture(self, inputs: Tensor) -> Forward:
        """Capturing runs the model a few times: its buffers and the generators are put back."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        devices = [inputs.device] if inputs.is_cuda else []
        with (
            torch.random.fork_rng(devices=devices),
            torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False),  # a cached cast would not be captured
        ):
            graphed = torch.cuda.make_graphed_callables(Whole(self._model, self._eager), (inputs,), allow_unused_input=True)
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


def own_copy(parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """A gradient that may become `.grad` itself, copied: the next replay of the graph writes to the same memory."""
    return gradient.clone() if parameter.grad is None else None
