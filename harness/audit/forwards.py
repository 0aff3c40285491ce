"""What goes into and comes out of the model: rows, broken values, random draws, the arithmetic in use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.audit.evidence import Run
from harness.audit.tensors import broken, fingerprints, roundoff, tensors_in


class Forwards:
    """The outermost training forwards since the last backward."""

    def __init__(self, run: Run, *, keep_outputs: bool = False) -> None:
        self.run, self.keep_outputs = run, keep_outputs
        self.depth = 0
        self.names: dict[int, str] = {}  # parameter id -> name
        self.norms: dict[int, _BatchNorm] = {}
        self.before: Tensor | None = None  # generator state as the outermost forward began
        self.last: Tensor = torch.get_rng_state()  # as the last watched event ended
        self.reset()

    def reset(self) -> None:
        self.count, self.broken, self.draws, self.outside = 0, 0, False, False
        self.rows: list[tuple[str, int]] = []  # fingerprint and length
        self.first: nn.Module | None = None
        self.outputs: list[Tensor] = []  # of the outermost forwards, kept for a probe only

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.depth += 1
        self._note_arithmetic(args)
        if isinstance(module, _BatchNorm):
            self.norms.setdefault(id(module), module)
        if self.depth == 1 and torch.is_grad_enabled():
            self.before = torch.get_rng_state()
            self.outside |= not torch.equal(self.before, self.last)
            self.first = self.first or module
            for name, parameter in module.named_parameters():
                self.names.setdefault(id(parameter), name)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.depth = max(0, self.depth - 1)
        if self.depth or not torch.is_grad_enabled():
            return
        state = torch.get_rng_state()
        self.draws |= self.before is not None and not torch.equal(self.before, state)
        self.last = state
        self.run.forwards += 1
        self.count += 1
        self.broken += broken(output) or broken(list(args))
        if self.keep_outputs:
            self.outputs += [t for t in tensors_in(output) if t.ndim and t.requires_grad]
        if module is self.first:
            self.rows += fingerprints(args, kwargs)

    def _note_arithmetic(self, args: tuple[Any, ...]) -> None:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self.run.roundoff = max(self.run.roundoff, roundoff(torch.get_autocast_dtype(device)))
