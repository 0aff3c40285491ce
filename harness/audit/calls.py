"""The wrapped calls of a training loop: backward, clipping, loss scaling, clearing, scheduling, dropout, batch statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.audit.patches import Wrap
from harness.audit.tensors import dense, gradients, tensors_in, vector

if TYPE_CHECKING:
    from harness.audit.recorder import Recorder

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class Calls:
    """Wrappers that tell a recorder; each hands on its arguments and its result untouched, unless the run is calmed."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def methods(self) -> dict[str, Wrap]:
        return {
            "add_param_group": self._add_param_group,
            "zero_grad": self._noting("zero_grad"),
            "schedule": self._noting("schedule"),
            "scaler_scale": self._scale,
            "scaler_unscale": self._unscale,
            "scaler_step": self._scaler_step,
            "scaler_update": self._noting("update scale"),
        }

    def functions(self) -> dict[str, Wrap]:
        return {
            "backward": self._backward,
            "grad": self._grad,
            "clip_grad_norm_": self._clip,
            "clip_grad_value_": self._clip,
            "batch_norm": self._batch_norm,
            "scaled_dot_product_attention": self._attention,
            **dict.fromkeys(DROPOUTS, self._dropout),
        }

    def _noting(self, call: str) -> Wrap:
        def wrap(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.recorder.note(call)
            return original(*args, **kwargs)

        return wrap

    def _add_param_group(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        self.recorder.add(optimizer)
        return result

    # -- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder.backward_depth:  # checkpointing runs backward inside backward
            return original(*args, **kwargs)
        recorder.find_optimizers()
        recorder.run.backwards += 1
        if recorder.intervention.probe and args:
            recorder.run.coupled |= _coupled(args[0], recorder.forwards.outputs)
        for live in recorder.live.values():
            live.before_backward()
        recorder.backward_depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            recorder.backward_depth -= 1
        loss = _total(args[0] if args else kwargs.get("tensors"))
        for live in list(recorder.live.values()):
            live.after_backward(loss, recorder.loss_scale)
        self._end_of_backward()
        return result

    def _grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs or ())
        if recorder.backward_depth:
            return original(*args, **kwargs)
        recorder.find_optimizers()
        places = {id(p): place for place, p in enumerate(inputs)}
        reached = [live for live in recorder.live.values() if live.parameters and all(id(p) in places for p in live.parameters)]
        for live in reached:
            live.before_backward()
        result = original(*args, **kwargs)
        for live in reached:
            parts = [result[places[id(p)]] for p in live.parameters]
            manual = vector(torch.zeros_like(p) if g is None else g for p, g in zip(live.parameters, parts, strict=True))
            live.after_backward(_total(args[0] if args else kwargs.get("outputs")), recorder.loss_scale, manual)
        if reached:
            self._end_of_backward()
        return result

    def _end_of_backward(self) -> None:
        forwards = self.recorder.forwards
        forwards.reset()
        forwards.last = torch.get_rng_state()

    # -- between backward and step -----------------------------------------------------------------------------------

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = ("parameters", "max_norm" if "norm" in original.__name__ else "clip_value")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not isinstance(given["parameters"], Tensor):
            given["parameters"] = list(given["parameters"])  # it may be a generator
        parameters = given["parameters"]
        recorder, members = self.recorder, {id(p) for p in tensors_in(parameters)}
        touched = [live for live in recorder.live.values() if any(id(p) in members for p in live.parameters)]
        before = [gradients(live.parameters) for live in touched]
        result = original(**given) if len(args) <= len(names) else original(parameters, *args[1:], **kwargs)
        for live, gradient in zip(touched, before, strict=True):
            live.clipped(gradient, float(given[names[1]]), recorder.loss_scale)
        return result

    def _scale(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        self.recorder.loss_scale = float(scaler.get_scale())
        return result

    def _unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, optimizer, *args, **kwargs)
        live = self.recorder.live.get(id(optimizer))
        if live is not None:
            live.unscaled = True
            live.last_gradient = gradients(live.parameters)
            live.note("unscale")
        return result

    def _scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        live = self.recorder.live.get(id(optimizer))
        count = len(live.track.steps) if live is not None else 0
        result = original(scaler, optimizer, *args, **kwargs)
        if live is not None and len(live.track.steps) == count:
            live.skip()
        return result

    # -- layers that see more than their own sample ------------------------------------------------------------------

    def _dropout(
        self, original: Callable[..., Any], input: Any, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        recorder = self.recorder
        if training and p > 0:
            recorder.run.dropout_calls += 1
            if "dropout" in recorder.intervention.calm:
                return input
        return original(input, p, training, *args, **kwargs)

    def _attention(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        listed = list(args)
        p = listed[4] if len(listed) > 4 else kwargs.get("dropout_p", 0.0)
        if p > 0:
            self.recorder.run.dropout_calls += 1
            if "dropout" in self.recorder.intervention.calm:
                if len(listed) > 4:
                    listed[4] = 0.0
                else:
                    kwargs["dropout_p"] = 0.0
        return original(*listed, **kwargs)

    def _batch_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("training"):
            self.recorder.run.norm_calls += 1
            if "batch_norm" in self.recorder.intervention.calm:
                return original(**_with_fixed_statistics(given))
        return original(*args, **kwargs)


def _with_fixed_statistics(given: dict[str, Any]) -> dict[str, Any]:
    channels = given["input"].shape[1]
    fixed = {**given, "training": False}
    if given.get("running_mean") is None:
        fixed["running_mean"] = given["input"].new_zeros(channels)
        fixed["running_var"] = given["input"].new_ones(channels)
    return fixed


def _coupled(loss: Any, outputs: list[Tensor]) -> bool:
    """Whether d^2 loss / d out_i d out_j is other than zero for some row i = 0 or 1 and another row j."""
    if not isinstance(loss, Tensor):
        return False
    for output in outputs:
        rows = output.shape[0]
        try:
            (slope,) = torch.autograd.grad(loss, output, create_graph=True, allow_unused=True)
            for row in range(min(2, rows)):
                if slope is None or not slope.requires_grad or rows < 2:
                    break
                (bend,) = torch.autograd.grad(slope[row].square().sum(), output, retain_graph=True, allow_unused=True)
                others = torch.arange(rows) != row
                if bend is not None and bool(bend[others].abs().max() > 0):
                    return True
        except RuntimeError:  # no second derivative: nothing is known
            continue
    return False


def _total(outputs: Any) -> float:
    """The number that was differentiated; NaN when it was not one number each."""
    listed = [outputs] if isinstance(outputs, Tensor) else list(outputs or ())
    if not all(isinstance(t, Tensor) and t.numel() == 1 for t in listed):
        return math.nan
    return float(sum(dense(t).double().item() for t in listed))
