"""The wrapped calls of a training loop: backward, clipping, loss scaling, clearing, loading and scheduling."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accumulation_harness.audit.evidence import Call
from accumulation_harness.audit.observe.forwards import generators
from accumulation_harness.audit.observe.loss_graph import (
    coupled_copies,
    couplings,
    gradients_by_term,
    mixes_rows,
    slopes_by_term,
    term_names,
)
from accumulation_harness.audit.observe.observed import Observed
from accumulation_harness.audit.observe.tensors import dense, in_a_group, tensors_in
from accumulation_harness.observe.fence import See, Seeing
from accumulation_harness.observe.patches import Place

OURS, UNINSTALLED = __name__.partition(".")[0], "code that is not installed"
INSTALLED = ("site-packages", "dist-packages")
WITH_NORM = "clip_grads_with_norm_"  # not in older versions of torch


class Calls:
    """Notes in `observed` what it sees of them."""

    def __init__(self, observed: Observed, find_optimizers: Callable[[], None]) -> None:
        """`find_optimizers` adds the optimizers that were made before anybody watched."""
        self.observed, self.find_optimizers, self._clipping = observed, find_optimizers, False

    def seen(self) -> Mapping[Place, See]:
        """(class, method) or (module, function) -> who sees its calls."""
        return {
            (Optimizer, "add_param_group"): self._add_param_group,
            (Optimizer, "zero_grad"): self._noting_owner("zero_grad"),
            (nn.Module, "zero_grad"): self._noting_owner("zero_grad"),
            (Optimizer, "load_state_dict"): self._noting_owner("load"),
            (nn.Module, "load_state_dict"): self._noting_owner("load"),
            (LRScheduler, "step"): self._schedule,
            (GradScaler, "scale"): self._scale,
            (GradScaler, "unscale_"): self._unscale,
            (GradScaler, "step"): self._scaler_step,
            (GradScaler, "update"): self._update,
            (torch.autograd, "backward"): self._backward,
            (torch.autograd, "grad"): self._grad,
            (nn.utils, "clip_grad_norm_"): partial(self._clip, "max_norm"),
            (nn.utils, "clip_grad_value_"): partial(self._clip, "clip_value"),
            **({(nn.utils, WITH_NORM): partial(self._clip, "max_norm")} if hasattr(nn.utils, WITH_NORM) else {}),
        }

    def _update(self, *_: Any, **__: Any) -> Seeing:
        self.observed.note("update scale")
        yield

    def _noting_owner(self, call: Call) -> See:
        """Only in the windows of the optimizer, or of those of the module's parameters."""

        def see(owner: Any, *_: Any, **__: Any) -> Seeing:
            members = owner.parameters() if isinstance(owner, nn.Module) else ()
            for live in self.observed.holding(members, owner):
                live.note(call)
            yield

        return see

    def _schedule(self, scheduler: Any, *_: Any, **__: Any) -> Seeing:
        self.observed.note("schedule")
        if not any(known is scheduler for known in self.observed.schedules):
            self.observed.schedules.append(scheduler)
        yield

    def _add_param_group(self, optimizer: Any, *_: Any, **__: Any) -> Seeing:
        yield
        self.observed.made(optimizer)

    # -- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, *args: Any, **kwargs: Any) -> Seeing:
        observed = self.observed
        if observed.backward_depth:  # checkpointing runs backward inside backward
            return
        self.find_optimizers()
        observed.begin_window()
        observed.run.callers = observed.run.callers or tuple(_callers())
        observed.run.backwards += 1
        root = args[0] if args else kwargs.get("tensors")
        observed.run.float16 |= any(t.dtype == torch.float16 for t in tensors_in(root))
        if observed.intervention.leads and not observed.run.summed:
            observed.run.summed = _is_sum(root)
        if observed.forwards.probing:
            self._probe(root)
        leading = observed.leading
        if leading is not None and observed.intervention.terms == len(leading.track.steps):
            self._take_apart(root, leading.parameters)
        unowned = self._unowned()
        observed.run.copies |= bool(unowned)
        for live in observed.live.values():
            live.before_backward(unowned)
        with observed.differentiating():
            yield
        loss, lives = _total(root), observed.lives
        reached = frozenset(i for i, live in enumerate(lives) if live.after_backward(loss, observed.loss_scale))
        for i in reached:
            lives[i].reached_with(reached)
        self._end_of_backward()

    def _unowned(self) -> list[Tensor]:
        """The parameters of the model under way, where no optimizer holds any of them: it then holds copies (or none)."""
        observed = self.observed
        owned = {id(p) for live in observed.live.values() for p in live.parameters}
        model = observed.forwards.first
        found: list[Tensor] = [p for p in model.parameters() if p.requires_grad] if model is not None else []
        return [] if any(id(p) in owned for p in found) else found

    def _take_apart(self, root: Any, parameters: Sequence[Tensor]) -> None:
        """Differentiate each addend of the loss alone; none of it counts as a backward of the loop."""
        observed, run = self.observed, self.observed.run
        try:
            with observed.differentiating():
                parts = gradients_by_term(root, parameters)
        except Exception:  # hooks in the graph that raise: nothing is known
            parts = []
        if parts and len(run.term_names) in (0, len(parts)):
            run.term_names = term_names(root)
            run.terms.append(parts)

    def _probe(self, root: Any) -> None:
        """Differentiate the loss aside; none of it counts as a backward of the loop."""
        observed = self.observed
        leading = observed.leading
        try:
            with observed.differentiating():
                outputs = observed.forwards.outputs
                observed.run.mixes_rows |= mixes_rows([output for _, output in outputs], observed.forwards.made)
                bent = couplings(root, outputs)
                observed.run.coupled |= bent.rows
                observed.run.elementwise = bent.elementwise
                copies = coupled_copies(root, observed.forwards.names)
                observed.run.coupled_copies = max(observed.run.coupled_copies, copies)
                if leading is not None and not in_a_group():
                    forwards = observed.forwards.count
                    observed.run.term_slopes.append(slopes_by_term(root, outputs, forwards))
                    parts = gradients_by_term(root, leading.parameters, forwards)
                    observed.run.terms.append([part / observed.loss_scale for part in parts])
        except Exception:  # a graph that cannot be differentiated twice, or hooks in it that raise: nothing is known
            observed.run.terms.append([])
        observed.forwards.forget_slopes()

    def _grad(self, *args: Any, **kwargs: Any) -> Seeing:
        observed = self.observed
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs or ())
        if observed.backward_depth:
            return
        self.find_optimizers()
        places = {id(p): place for place, p in enumerate(inputs)}
        reached = [live for live in observed.live.values() if live.parameters and all(id(p) in places for p in live.parameters)]
        for live in reached:
            live.before_backward()
        aside = [] if reached else observed.forwards.unreached
        result = yield
        for forward in aside:
            forward.reached = False
        for live in reached:
            parts = [result[places[id(p)]] for p in live.parameters]
            manual = live.sample.take(parts)
            live.after_backward(_total(args[0] if args else kwargs.get("outputs")), observed.loss_scale, manual)
        if reached:
            self._end_of_backward()

    def _end_of_backward(self) -> None:
        forwards = self.observed.forwards
        forwards.reset()
        forwards.last = generators()

    # -- between backward and step -----------------------------------------------------------------------------------

    def _clip(self, limit: str, *args: Any, **kwargs: Any) -> Seeing:
        if self._clipping:  # one is made of the other
            return
        given = {**dict(zip(("parameters", limit), args, strict=False)), **kwargs}
        parameters = given["parameters"]
        observed = self.observed
        touched = observed.holding([parameters] if isinstance(parameters, Tensor) else parameters)
        before = [live.unclipped(by_value=limit == "clip_value") for live in touched]
        self._clipping = True
        try:
            yield
        finally:
            self._clipping = False
        for live, gradient in zip(touched, before, strict=True):
            live.clipped(gradient, float(given[limit]), observed.loss_scale)

    def _scale(self, scaler: Any, *_: Any, **__: Any) -> Seeing:
        yield
        if not any(known is scaler for known in self.observed.scalers):
            self.observed.scalers.append(scaler)
        self.observed.loss_scale = float(scaler.get_scale())

    def _unscale(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Seeing:
        yield
        live = self.observed.live.get(id(optimizer))
        if live is not None:
            live.unscaled()

    def _scaler_step(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Seeing:
        live = self.observed.live.get(id(optimizer))
        count = len(live.track.steps) if live is not None else 0
        yield
        if live is not None and len(live.track.steps) == count:
            live.skip()


def _is_sum(loss: Any) -> bool:
    """Whether the loss is a sum of terms, or may be."""
    try:
        return bool(term_names(loss))
    except Exception:  # a graph too deep to be looked through
        return True


def _total(outputs: Any) -> float:
    """The number that was differentiated; NaN when it was not one number each."""
    listed = [outputs] if isinstance(outputs, Tensor) else list(outputs or ())
    if not all(isinstance(t, Tensor) and t.numel() == 1 for t in listed):
        return math.nan
    return float(sum(dense(t).double().item() for t in listed))


def _callers() -> Iterator[str]:
    """The installed packages whose frames led here, innermost first; one name for all code between that is not installed."""
    frame: FrameType | None = sys._getframe(1)
    last = OURS
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package != OURS:
            is_installed = package == "torch" or any(folder in frame.f_code.co_filename for folder in INSTALLED)
            package = package if is_installed else UNINSTALLED
        if package not in (OURS, last):
            yield package
        frame, last = frame.f_back, package
