"""Where the loss is looked at: the results of PyTorch's loss functions, else the slope at the outputs of the watched model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accumulation_harness.audit.observe.patches import Place
from accumulation_harness.watch.fence import Fence, See
from accumulation_harness.watch.sketch import is_plain
from accumulation_harness.watch.slopes import Loss, Numbers, is_transformed, labelled, measured, received
from accumulation_harness.watch.track import Head

LARGE = 1 << 20  # logits that are looked at in a sample of windows only
MOST = 4  # outputs of a model that may be logits
CLASSES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
BINARY = ("input", "target", "weight", "size_average", "reduce", "reduction")
SQUARED = ("input", "target", "size_average", "reduce", "reduction", "weight")
KEPT_OUT = ("hidden_states", "attentions", "past_key_values", "last_hidden_state")


def _arithmetic() -> torch.dtype | None:
    """What autocast computes in here; None where it is off."""
    kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class Heads:
    """The logits of the micro-batch under way."""

    def __init__(self, fence: Fence) -> None:
        self.fence = fence
        self.detail = True
        self.paused = False
        self._called = False  # a loss function is under way
        self._outputs: list[Head] = []
        self._losses: list[Head] = []
        self._fed = False
        self._forwards = 0  # since the last backward
        self._passed_over = False
        self.autocast: torch.dtype | None = None  # of the last forward
        self._inside = False  # whether a layer of the forward under way has told

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
        if not self._inside:
            self.autocast = _arithmetic()
        self._inside = False
        self._fed = self._fed or any(isinstance(t, Tensor) and t.requires_grad for t in (*args, *kwargs.values()))
        for z in list(_logits(output))[:MOST]:
            self._look_at(z)

    def inside(self) -> None:
        """A layer's forward begins: trainers put the arithmetic of autocast inside the model's own forward."""
        if not self.paused:
            self.autocast, self._inside = _arithmetic(), True

    def functions(self) -> Mapping[Place, See]:
        """The loss functions, and who sees their calls."""
        return {
            (functional, "cross_entropy"): self._of_classes,
            (functional, "nll_loss"): self._of_classes,
            (functional, "mse_loss"): self._elementwise(Loss.squared, SQUARED),
            (functional, "binary_cross_entropy"): self._elementwise(Loss.binary, BINARY),
            (functional, "binary_cross_entropy_with_logits"): self._elementwise(Loss.binary, BINARY),
        }

    def _result(self) -> Generator[None, Any, Any]:
        """What a loss function has returned; None where it was called by itself, as for modes and subclasses of Tensor."""
        inner, self._called = self._called, True
        try:
            loss = yield
        finally:
            self._called = inner
        return None if inner else loss

    def _of_classes(self, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        given = {**dict(zip(CLASSES, args, strict=False)), **kwargs}
        loss = yield from self._result()
        z, target, weight = given.get("input"), given.get("target"), given.get("weight")
        if not is_plain(z) or not is_plain(target) or z.dim() < 2:
            return
        ignore, detail = given.get("ignore_index", -100), self.detail
        classes, num = z.shape[1], z.numel() // z.shape[1]  # the hook must not keep the logits

        def numbers(u: Tensor, of: Tensor, reduction: str) -> Numbers:
            if target.is_floating_point():  # probabilities
                return received(u, of, reduction, num)
            y = target.reshape(-1)
            counted = y != ignore
            own = counted.float() if weight is None else weight.detach().float()[y.where(counted, 0)] * counted
            found = received(u, of, reduction, own)
            return labelled(found, y, classes) if detail else found

        self._follow(loss, given, Loss.cross_entropy, z.shape[0], numbers)

    def _elementwise(self, kind: Loss, names: Sequence[str]) -> See:
        def see(*args: Any, **kwargs: Any) -> Generator[None, Any, None]:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            loss = yield from self._result()
            z, target = given.get("input"), given.get("target")
            weighted = names is SQUARED and given.get("weight") is not None  # a mean over its weights
            if is_plain(z) and is_plain(target) and not target.requires_grad and not weighted:
                num = torch.broadcast_shapes(z.shape, target.shape).numel()
                rows = z.shape[0] if z.dim() else 1
                self._follow(loss, given, kind, rows, lambda u, of, reduction: received(u, of, reduction, num))

        return see

    def _follow(
        self,
        loss: Any,
        given: Mapping[str, Any],
        kind: Loss,
        rows: int,
        numbers: Callable[[Tensor, Tensor, str], Numbers],
    ) -> None:
        """Look at the gradient that a loss function's result receives."""
        old = given.get("size_average") is not None or given.get("reduce") is not None
        if old or self.paused or not _is_followed(loss):
            return
        value, reduction = loss.detach().clone(), given.get("reduction", "mean")

        def look(u: Tensor) -> None:
            if not self.paused:
                self._losses.append(Head({kind: numbers(u, value, reduction)}, rows))

        loss.register_hook(self.fence.hook(look))

    def _look_at(self, z: Tensor) -> None:
        """Look at the slope of the loss at logits, if no loss function has told what it is."""
        if not _is_followed(z) or z.is_leaf:
            return
        if z.numel() > LARGE and not self.detail:
            self._passed_over = True
            return
        logits, rows = z.detach(), z.shape[0] if z.dim() else 1

        def look(g: Tensor) -> None:
            if not self.paused and not self._losses:
                self._outputs.append(Head(measured(logits, g.detach()), rows, _narrower(g.dtype, logits.dtype)))

        z.register_hook(self.fence.hook(look))


def _is_followed(tensor: Any) -> bool:
    return is_plain(tensor) and tensor.requires_grad and torch.is_grad_enabled() and not is_transformed(tensor)


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
