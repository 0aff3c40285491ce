"""What a training loop calls that its observers see: which functions these are, and what of their arguments matters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, ReduceLROnPlateau

from accumulation_harness.observe.fence import See, Seeing
from accumulation_harness.observe.followed import Followed
from accumulation_harness.observe.patches import Place

T = TypeVar("T", bound=Followed)
Draws = tuple[bytes, ...]
SCHEDULES = (LRScheduler, CosineAnnealingWarmRestarts, ReduceLROnPlateau)  # the others advance by the first one's `step`
CLIPS = {  # function that clips gradients -> its limit; the last one is not in older versions of torch
    "clip_grad_norm_": "max_norm",
    "clip_grad_value_": "clip_value",
    "clip_grads_with_norm_": "max_norm",
}


class Loop(Generic[T]):
    """The calls of a loop, told by the optimizers that they concern; of one that is made of another, the outer one alone."""

    clips_under_way = False

    def calls(self) -> dict[Place, See]:
        """(class, method) or (module, function) -> who sees its calls."""
        return {
            (torch.autograd, "backward"): self._backward,
            (torch.autograd, "grad"): self._grad,
            **{(kind, "step"): self._schedule for kind in SCHEDULES},
            (GradScaler, "scale"): self._scale,
            (GradScaler, "unscale_"): self._unscale,
            (GradScaler, "step"): self._scaler_step,
            (GradScaler, "update"): self._update,
            **{(nn.utils, name): partial(self._clip, limit) for name, limit in CLIPS.items() if hasattr(nn.utils, name)},
        }

    @property
    def followed(self) -> Iterable[T]:
        """The optimizers, as they are known by now."""
        raise NotImplementedError

    def holding(self, tensors: Any) -> list[T]:
        """Those that have one of these parameters."""
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        return [one for one in self.followed if one.holds(listed)]

    # -- what an observer does ---------------------------------------------------------------------------------------

    def differentiation(self, root: Any, inputs: list[Tensor] | None) -> Seeing:
        """Of a root; by these inputs alone, whose gradients are the result, or into `.grad`."""
        raise NotImplementedError

    def clipped(self, one: T, before: Any, limit: Any) -> None:
        """Gradients of this optimizer were clipped; `before`: what it said as they were about to be."""

    def scheduled(self, scheduler: Any) -> None:
        """A schedule has advanced."""

    def scaled(self, scaler: Any) -> None:
        """A loss was multiplied by the loss scale."""

    def scale_updated(self) -> None:
        """The loss scale was updated."""

    def skipped(self, one: T) -> None:
        """A loss scaler left this optimizer's step out."""

    # -- the calls ---------------------------------------------------------------------------------------------------

    def _backward(self, *args: Any, **kwargs: Any) -> Seeing:
        yield from self.differentiation(args[0] if args else kwargs.get("tensors"), None)

    def _grad(self, *args: Any, **kwargs: Any) -> Seeing:
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        listed = [inputs] if isinstance(inputs, Tensor) else list(inputs or ())
        yield from self.differentiation(args[0] if args else kwargs.get("outputs"), listed)

    def _clip(self, limit: str, *args: Any, **kwargs: Any) -> Seeing:
        if self.clips_under_way:
            return
        given = {**dict(zip(("parameters", limit), args, strict=False)), **kwargs}
        touched = [(one, one.before_clip()) for one in self.holding(given.get("parameters"))]
        self.clips_under_way = True
        try:
            yield
        finally:
            self.clips_under_way = False
        for one, before in touched:
            self.clipped(one, before, given.get(limit))

    def _schedule(self, scheduler: Any, *_: Any, **__: Any) -> Seeing:
        yield
        self.scheduled(scheduler)

    def _scale(self, scaler: Any, *_: Any, **__: Any) -> Seeing:
        yield
        if scaler.is_enabled():
            self.scaled(scaler)

    def _unscale(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Seeing:
        yield
        for one in self.followed if scaler.is_enabled() else ():
            if one.optimizer is optimizer:
                one.unscaled()

    def _scaler_step(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Seeing:
        taken = [(one, one.num_steps) for one in self.followed if one.optimizer is optimizer]
        yield
        for one, count in taken:
            if one.num_steps == count:
                self.skipped(one)

    def _update(self, scaler: Any, *_: Any, **__: Any) -> Seeing:
        yield
        if scaler.is_enabled():
            self.scale_updated()


def draws() -> Draws:
    """Note where PyTorch's generators stand, without waiting for a device.

    Returns:
        The state of the CPU's generator, and of each GPU's once CUDA is in use; equal notes mean that nothing was drawn
        between.
    """
    cuda = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if cuda else ())]
    return tuple(state.numpy().tobytes() for state in states)
