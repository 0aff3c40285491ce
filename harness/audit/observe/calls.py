"""The wrapped calls of a training loop (backward, clipping, loss scaling, clearing, scheduling, dropout, batch statistics).

Functions are replaced wherever they have been imported, and every one of them is put back.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from harness.audit.observe.loss_graph import coupled_rows, gradients_by_term, mixes_rows, slopes_by_term
from harness.audit.observe.tensors import dense, gradients, in_a_group, tensors_in, vector

if TYPE_CHECKING:
    from harness.audit.observe.recorder import Recorder

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
Wrap = Callable[..., Any]  # (original, *args, **kwargs) -> result

FUNCTIONS: dict[str, tuple[Any, str]] = {
    "backward": (torch.autograd, "backward"),
    "grad": (torch.autograd, "grad"),
    "clip_grad_norm_": (torch.nn.utils, "clip_grad_norm_"),
    "clip_grad_value_": (torch.nn.utils, "clip_grad_value_"),
    "batch_norm": (functional, "batch_norm"),
    "scaled_dot_product_attention": (functional, "scaled_dot_product_attention"),
    **{name: (functional, name) for name in DROPOUTS},
}
METHODS: dict[str, tuple[type, str]] = {
    "add_param_group": (torch.optim.Optimizer, "add_param_group"),
    "zero_grad": (torch.optim.Optimizer, "zero_grad"),
    "module_zero_grad": (torch.nn.Module, "zero_grad"),
    "load": (torch.optim.Optimizer, "load_state_dict"),
    "module_load": (torch.nn.Module, "load_state_dict"),
    "schedule": (torch.optim.lr_scheduler.LRScheduler, "step"),
    "scaler_scale": (torch.amp.GradScaler, "scale"),
    "scaler_unscale": (torch.amp.GradScaler, "unscale_"),
    "scaler_step": (torch.amp.GradScaler, "step"),
    "scaler_update": (torch.amp.GradScaler, "update"),
}


class Calls:
    """Wrappers that tell a recorder; each hands on its arguments and its result untouched, unless the run is calmed."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def methods(self) -> dict[str, Wrap]:
        return {
            "add_param_group": self._add_param_group,
            "zero_grad": self._noting_owner("zero_grad"),
            "module_zero_grad": self._noting_owner("zero_grad"),
            "load": self._noting_owner("load"),
            "module_load": self._noting_owner("load"),
            "schedule": self._schedule,
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

    def _noting_owner(self, call: str) -> Wrap:
        """Only in the windows of the optimizer, or of those of the module's parameters."""

        def wrap(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
            members = {id(p) for p in owner.parameters()} if isinstance(owner, torch.nn.Module) else set()
            for live in self.recorder.live.values():
                if live.optimizer is owner or any(id(p) in members for p in live.parameters):
                    live.note(call)
            return original(owner, *args, **kwargs)

        return wrap

    def _schedule(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self.recorder.note("schedule")
        lengths = [getattr(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters")]
        run = self.recorder.run
        run.horizon = max([run.horizon, *(float(n) for n in lengths if isinstance(n, (int, float)))])
        return original(scheduler, *args, **kwargs)

    def _add_param_group(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        self.recorder.made(optimizer)
        return result

    # -- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if recorder.backward_depth:  # checkpointing runs backward inside backward
            return original(*args, **kwargs)
        recorder.find_optimizers()
        recorder.run.backwards += 1
        root = args[0] if args else kwargs.get("tensors")
        recorder.run.float16 |= any(t.dtype == torch.float16 for t in tensors_in(root))
        if recorder.forwards.probing:
            self._probe(root)
        unowned = self._unowned()
        for live in recorder.live.values():
            live.before_backward(unowned)
        recorder.backward_depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            recorder.backward_depth -= 1
        loss, lives = _total(root), list(recorder.live.values())
        reached = frozenset(i for i, live in enumerate(lives) if live.after_backward(loss, recorder.loss_scale))
        for i in reached:
            lives[i].reached_with(reached)
        self._end_of_backward()
        return result

    def _unowned(self) -> list[Tensor]:
        """The parameters of the model under way, where no optimizer holds any of them: it then holds copies (or none)."""
        recorder = self.recorder
        owned = {id(p) for live in recorder.live.values() for p in live.parameters}
        model = recorder.forwards.first
        found: list[Tensor] = [p for p in model.parameters() if p.requires_grad] if model is not None else []
        return [] if any(id(p) in owned for p in found) else found

    def _probe(self, root: Any) -> None:
        """Differentiate the loss aside; none of it counts as a backward of the loop."""
        recorder = self.recorder
        leading = next(iter(recorder.live.values()), None)
        recorder.backward_depth += 1
        try:
            outputs = recorder.forwards.outputs
            recorder.run.mixes_rows |= mixes_rows([output for _, output in outputs], recorder.forwards.made)
            recorder.run.coupled |= coupled_rows(root, outputs)
            if leading is not None and not in_a_group():
                recorder.run.term_slopes.append(slopes_by_term(root, outputs))
                recorder.run.terms.append([term / recorder.loss_scale for term in gradients_by_term(root, leading.parameters)])
        except Exception:  # a graph that cannot be differentiated twice, or hooks in it that raise: nothing is known
            recorder.run.terms.append([])
        finally:
            recorder.backward_depth -= 1
        recorder.forwards.forget_slopes()

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


def _total(outputs: Any) -> float:
    """The number that was differentiated; NaN when it was not one number each."""
    listed = [outputs] if isinstance(outputs, Tensor) else list(outputs or ())
    if not all(isinstance(t, Tensor) and t.numel() == 1 for t in listed):
        return math.nan
    return float(sum(dense(t).double().item() for t in listed))


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
        known = list(namespaces)
        _replace(wrappers, known)
        backwards = {id(wrapper): (wrapper, original) for original, wrapper in wrappers.values()}
        self._undo.append(lambda: _replace(backwards, known))  # also in modules that were imported meanwhile

    def removing(self, handle: Any) -> None:
        """Also remove this hook on `restore`."""
        self._undo.append(handle.remove)

    def restore(self) -> None:
        while self._undo:
            self._undo.pop()()


def _replace(pairs: dict[int, tuple[Any, Any]], namespaces: Iterable[dict[str, Any]]) -> None:
    """In all imported modules and `namespaces`, the second of each pair in place of the first, whose identity is the key."""
    spaces = {id(vars(module)): vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")}
    spaces |= {id(space): space for space in namespaces}
    for space in spaces.values():
        for name, value in list(space.items()):
            found = pairs.get(id(value))
            if found is not None and value is found[0]:
                space[name] = found[1]


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
