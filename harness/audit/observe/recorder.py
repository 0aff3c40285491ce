"""Watching a training function: hooks and wrappers that read and never change, and are taken away afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from harness.audit.evidence import WATCH, Intervention, Run
from harness.audit.observe import shadows
from harness.audit.observe.calls import Calls, Patches, Wrap
from harness.audit.observe.foreign import FastaiAdapter, Foreign, HandedWeights, KerasAdapter
from harness.audit.observe.forwards import Forwards
from harness.audit.observe.live import LiveTrack
from harness.audit.observe.tensors import transforming

SHADOW_SEARCH = 2  # optimizer steps after which averaged copies are looked for (once: it looks at every object)


class Recorder:
    """Context in which one run is watched; `run` holds the evidence afterwards."""

    def __init__(self, run: Run, intervention: Intervention = WATCH, namespaces: Iterable[dict[str, Any]] = ()) -> None:
        self.run, self.intervention = run, intervention
        self.forwards = Forwards(run)
        self.live: dict[int, LiveTrack] = {}
        self.stepping: list[Optimizer] = []
        self.backward_depth = 0
        self.prepared = False
        self.scanned = False
        self.loss_scale = 1.0
        self._namespaces = list(namespaces)
        self._patches = Patches()
        self._calls = Calls(self)
        self._keras = KerasAdapter(self)
        self._fastai = FastaiAdapter(self)
        self.handed = HandedWeights()

    def __enter__(self) -> Self:
        patches = self._patches
        try:
            patches.removing(register_optimizer_step_pre_hook(self._before_step))
            patches.removing(register_optimizer_step_post_hook(self._after_step))
            patches.removing(register_module_forward_pre_hook(self._enter))
            patches.removing(register_module_forward_hook(self._leave, with_kwargs=True, always_call=True))
            patches.methods(self._calls.methods())
            patches.functions(self._calls.functions(), self._namespaces)
            self._fastai.look()
        except BaseException:
            patches.restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.restore()
        for place, live in enumerate(self.live.values()):
            live.finish()
            live.track.place = place
        tracks = [live.track for live in self.live.values() if live.track.steps]
        if self.handed.track.steps:
            tracks.append(self.handed.track)
        self.run.probed = self.forwards.probed(self.loss_scale)
        self.run.tracks = tracks or [live.track for live in self.live.values() if live.track.pending]
        self.live.clear()
        self.forwards.forget_models()

    def add(self, optimizer: Optimizer | Foreign) -> LiveTrack:
        """The track of an optimizer, made when first seen; its parameters are looked up again until it steps."""
        live = self.live.get(id(optimizer))
        if live is None:
            live = self.live[id(optimizer)] = LiveTrack(optimizer, self.run, self.forwards, self.intervention.keep)
        return live

    def made(self, optimizer: Optimizer) -> None:
        """An optimizer is being made, or gets more parameters. A forward before the first one (for shapes) is of no window."""
        begun = self.run.backwards or any(live.backwards or live.track.steps for live in self.live.values())
        if id(optimizer) not in self.live and not begun:
            self.forwards.begin()
            self.prepared = False
        self.add(optimizer)

    def hand_over(self, weights: Mapping[str, Any]) -> None:
        """Take the weights of a framework that is not torch: its starting weights first, then those after each step."""
        self.handed.take(weights)

    def note(self, call: str) -> None:
        """Add to the order of calls of every optimizer's window."""
        for live in self.live.values():
            live.note(call)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if transforming():
            return
        if self.forwards.depth == 0 and self.intervention.averages:
            for index, live in enumerate(self.live.values()):
                live.intervene_on_averages(self.intervention, index)
        if self.forwards.depth == 0 and torch.is_grad_enabled():
            self.prepare()
            self.note("forward")
            leading = next(iter(self.live.values()), None)
            self.forwards.micro_batch = len(leading.backwards) if leading else 0
            self.forwards.probing = self.intervention.probe == (len(leading.track.steps) if leading else 0)
        self.forwards.enter(module, args)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not transforming():
            self.forwards.leave(module, args, kwargs, output)

    def prepare(self) -> None:
        """Before the first forward: put the starting weights the intervention asks for."""
        if self.prepared:
            return
        self.prepared = True
        self.find_optimizers()
        for index, live in enumerate(self.live.values()):
            live.refresh()
            live.intervene(self.intervention, index, -1)

    def find_optimizers(self) -> None:
        """Optimizers made before the function was called (once: it looks at every object)."""
        self._keras.look()
        self._fastai.look()
        if self.scanned:
            return
        self.scanned = True
        self._fastai.look_back()
        if not self.live:
            for item in gc.get_objects():
                if issubclass(type(item), Optimizer) and getattr(item, "param_groups", None):
                    self.add(item)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        nested = self._is_stepping(optimizer)
        self.stepping.append(optimizer)
        if nested or not getattr(optimizer, "param_groups", None):
            return
        self.add(optimizer).before_step()

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        while self.stepping and self.stepping.pop() is not optimizer:
            pass
        live = self.live.get(id(optimizer))
        if live is None or self._is_stepping(optimizer):
            return
        if live.inner_stepped:  # a wrapper around another optimizer of the same parameters: the inner one is the one to watch
            del self.live[id(optimizer)]
            return
        for outer in self.stepping:
            if id(outer) in self.live and self.live[id(outer)].shares(live):
                self.live[id(outer)].inner_stepped = True
        live.after_step(in_backward=self.backward_depth > 0, loss_scale=self.loss_scale)
        self._look_for_shadows(live)
        self.settle(live)

    def _is_stepping(self, optimizer: Optimizer) -> bool:
        """Whether its step is under way: one that calls the step of its base class fires the hooks of both."""
        return any(other is optimizer for other in self.stepping)

    def settle(self, live: LiveTrack) -> None:
        """After a step: put the weights the intervention asks for."""
        index = [*self.live].index(id(live.optimizer))
        live.intervene(self.intervention, index, live.num_effective - 1)

    def patch(self, owner: type, name: str, wrap: Wrap) -> None:
        """Replace one more method until the end of the run."""
        self._patches.method(owner, name, wrap)

    def _look_for_shadows(self, live: LiveTrack) -> None:
        if len(live.track.steps) == SHADOW_SEARCH:
            others = [p for other in self.live.values() for p in other.parameters]
            live.shadows = shadows.find(live.parameters, [*live.own_tensors(), *others])
