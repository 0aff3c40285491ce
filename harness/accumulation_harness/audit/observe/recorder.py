"""Watching a training function: hooks and wrappers that read and never change, and are taken away afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from typing_extensions import Self

from accumulation_harness.audit.evidence import WATCH, Intervention, Run, Track, norms_by
from accumulation_harness.audit.observe.adapters import FastaiAdapter, KerasAdapter, alive
from accumulation_harness.audit.observe.handed import EVERY, OBSERVER, HandRecorder, Most
from accumulation_harness.audit.observe.interventions import intervene
from accumulation_harness.audit.observe.layers import Layers
from accumulation_harness.audit.observe.modules import Modules
from accumulation_harness.audit.observe.observed import Observed
from accumulation_harness.compare.linear import norm
from accumulation_harness.observe.fence import Fence
from accumulation_harness.observe.patches import Patches
from accumulation_harness.system.state import transforming

ALIKE = 0.02  # relative; norms of samples are known to about a hundredth


class Recorder(HandRecorder):
    """Context in which one run is watched by the hooks of torch as well."""

    def __init__(
        self,
        run: Run,
        intervention: Intervention = WATCH,
        namespaces: Iterable[dict[str, Any]] = (),
        most: Most = EVERY,
    ) -> None:
        """`namespaces`: of functions that may have imported what is replaced, besides those of the imported modules.

        `EnoughSteps` is raised where a step begins after `most` of them.
        """
        super().__init__(run, intervention, most)
        self._optimizers = 1
        self._rows: set[str] = set()  # of the windows so far, where it is asked whether they come again
        self._looked, self._again = 0, 0.0  # at so many windows, of which so many had rows of earlier ones
        self._fence = Fence(self._ended, OBSERVER)
        self.observed = Observed(run, intervention, self._fence, self._find_optimizers)
        self._stepping: list[Optimizer] = []
        self._scanned = False
        self._namespaces = list(namespaces)
        self._steps_seen = Patches()  # outside of the fence: what nobody observes any longer ends as well
        self._layers = Layers(run, intervention.disable)
        self._modules = None if intervention.place is None else Modules(self._fence, intervention.inside)
        self._keras = KerasAdapter(self.observed, self._fence.replace, self.count_step)
        self._fastai = FastaiAdapter(self.observed, self._fence.replace, self.count_step)

    def __enter__(self) -> Self:
        fence = self._fence
        try:
            fence.open()
            self._keras.look()  # those of earlier runs are found before this one makes its own
            self._steps_seen.removing(register_optimizer_step_pre_hook(self._before_step))
            self._steps_seen.removing(register_optimizer_step_post_hook(self._after_step))
            fence.hooked(register_module_forward_pre_hook, self._enter)
            if self._modules is not None:
                self._steps_seen.removing(register_module_forward_pre_hook(self._lend))
            fence.hooked(register_module_forward_hook, self._leave, with_kwargs=True, always_call=True)
            fence.replace(self.observed.calls(), self._layers.wraps(), self._namespaces)
            self._fastai.look()
            fence.run(self.take_out)
        except BaseException:
            self._put_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._put_back()
        if not self._fence.reason:
            self._fence.run(self._finish)
        self.observed.live.clear()
        self._fence.run(self.observed.forwards.forget_models)

    def _put_back(self) -> None:
        self._fence.run(self.put_back)
        self._fence.close()
        self._steps_seen.restore()

    def _ended(self) -> None:
        self.observed.run.error = self._fence.reason

    def _finish(self) -> None:
        observed = self.observed
        observed.states.finish(observed.known)
        for place, live in enumerate(observed.lives):
            live.finish()
            live.track.place = place
        tracks = [live.track for live in observed.lives if live.track.steps]
        if self._modules is not None:
            observed.run.calls = self._modules.found(observed.loss_scale)
        observed.run.probed = observed.forwards.probed(observed.loss_scale)
        if observed.run.copies:
            observed.run.arithmetic = max(observed.run.arithmetic, observed.forwards.copied)
        observed.run.tracks = [*tracks]
        self.finish()
        self._let_one_rule(tracks)
        observed.run.tracks = observed.run.tracks or [live.track for live in observed.lives if live.track.pending]

    def _let_one_rule(self, seen: Sequence[Track]) -> None:
        """Of an optimizer that hooks see and that is handed over, what says more is compared: of weights alone, the hooks."""
        handed, run = self.handed.track, self.run
        same = next((track for track in seen if handed.steps and _is_one(track, handed)), None)
        if same is None:
            return
        rules, other = (same, handed) if self.handed.of_weights_alone else (handed, same)
        run.tracks = [track for track in run.tracks if track is not other]
        run.beside = [] if rules is same else [same]

    def hand(self, weights: Any = None, gradient: Any = None, contribution: Any = None) -> Any:
        """Take the run's own weights before those that the intervention asks for."""
        moved = super().hand(weights, gradient, contribution)
        self.observed.waits |= weights is not None
        self._fence.run(self.observed.put_weights)
        return moved

    def returned(self, result: Any) -> None:
        """Take what the function has returned."""
        self._fence.run(super().returned, result)

    @property
    def _aside(self) -> bool:
        """Whether forwards are none of the loop's own: inside a transform, or computed again for a backward (checkpointing)."""
        return transforming() or self.observed.backward_depth > 0

    @property
    def _placing(self) -> bool:
        """Whether the window under way is looked at module by module."""
        return self.observed.intervention.place == self.observed.at[0]

    def _lend(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """What a module is handed, as views where it has a slope. `torch.no_grad` inside a forward is a checkpoint's."""
        modules = self._modules
        if modules is None or self._fence.is_deaf or self._aside or not self._placing:
            return None
        return self._fence.run(modules.enter, module, args) if modules.under_way or torch.is_grad_enabled() else None

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._aside:
            return
        observed, forwards = self.observed, self.observed.forwards
        if forwards.depth == 0:
            window, micro_batch = observed.at
            observed.states.begin(window, micro_batch, [*forwards.outermost.values()])
            if torch.is_grad_enabled():
                self._prepare(module)
                observed.begin_window(module)
                observed.note("forward")
                forwards.micro_batch, forwards.probing = micro_batch, observed.intervention.probe == window
        forwards.enter(module, args)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """`rest`: keywords and output; torch leaves out the keywords where the forward has raised (checkpoints end one so)."""
        if not self._aside:
            kwargs, output = rest if len(rest) == 2 else ({}, *rest)
            self.observed.forwards.leave(module, args, kwargs, output)
            if self._modules is not None and self._modules.under_way:
                self._modules.leave(module, args, kwargs, output)
        elif self._modules is not None and self._placing and len(rest) == 2 and not transforming():
            self._modules.leave_again(module, rest[1])

    def _prepare(self, module: nn.Module) -> None:
        """Before the first backward: put the starting weights that the intervention asks for.

        Into what was there before the function was called only once the function uses it: the rest is somebody else's.
        """
        observed = self.observed
        if observed.run.backwards or (observed.live and observed.prepared.issuperset(observed.live)):
            return
        self._find_optimizers()
        used = {id(p) for p in module.parameters()}
        for index, live in enumerate(observed.lives):
            if id(live.optimizer) in observed.prepared:
                continue
            live.refresh()
            if observed.is_found(live) and used.isdisjoint(map(id, live.parameters)):
                continue
            observed.prepared.add(id(live.optimizer))
            intervene(live, observed.intervention, index, live.num_effective - 1)

    def _find_optimizers(self) -> None:
        """Optimizers made before the function was called (once: it looks at every object)."""
        self._keras.look()
        self._fastai.look()
        if self._scanned:
            return
        self._scanned = True
        self._fastai.look_back()
        if not self.observed.live:
            for item in alive():
                if issubclass(type(item), Optimizer) and getattr(item, "param_groups", None):
                    self.observed.found.add(id(item))
                    self.observed.add(item)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        nested = self._is_stepping(optimizer)
        self._stepping.append(optimizer)
        if not nested and getattr(optimizer, "param_groups", None):
            self._fence.hook(self.observed.add)(optimizer)
            self.count_step()
            self._fence.hook(self._begin_step)(optimizer)

    def _begin_step(self, optimizer: Optimizer) -> None:
        self._fence.windows = self.steps - 1
        self.observed.add(optimizer).before_step()

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        while self._stepping and self._stepping.pop() is not optimizer:
            pass
        if not self._is_stepping(optimizer):
            self._fence.hook(self._end_step)(optimizer)

    def _end_step(self, optimizer: Optimizer) -> None:
        observed = self.observed
        live = observed.live.get(id(optimizer))
        if live is None:
            return
        if live.is_wrapper:  # around other optimizers of the same parameters, which are the ones to watch
            del observed.live[id(optimizer)]
            return
        for outer in self._stepping:
            if id(outer) in observed.live:
                observed.live[id(outer)].stepped_inside(live)
        live.after_step(in_backward=observed.backward_depth > 0, loss_scale=observed.loss_scale)
        for other in observed.live.values():
            if other is not live:
                other.note("other step")
        observed.settle(live)

    def look_whether_over(self) -> None:
        """By the most of each optimizer that was there at the first step."""
        self._fence.hook(self._see_whether_over)()

    def _see_whether_over(self) -> None:
        if not self.steps:
            every = [*self.observed.live.values()]
            made = [live for live in every if not self.observed.is_found(live)]  # others may be an earlier run's
            self._optimizers, self.began = max(1, len(made or every)), time.monotonic()
        if not self.steps % self._optimizers:
            if self.most.few is not None:
                self._look_for_rows_again()
            seconds = time.monotonic() - self.began
            self.is_over = self.most.is_over(self.steps // self._optimizers, seconds, self._again)

    def _look_for_rows_again(self) -> None:
        """In the windows since the last look; where rows are not seen, they may come at any time."""
        leading = self.observed.leading
        for step in leading.track.steps[self._looked :] if leading is not None else ():
            self._looked += 1
            rows = step.rows
            self._again += math.inf if rows is None else not self._rows.isdisjoint(rows)
            self._rows.update(rows or ())

    def _is_stepping(self, optimizer: Optimizer) -> bool:
        """Whether its step is under way: one that calls the step of its base class fires the hooks of both."""
        return any(other is optimizer for other in self._stepping)


def _is_one(track: Track, handed: Track) -> bool:
    """Whether both began with as many numbers of the same norm, in whatever order and tensors (an engine joins them)."""
    size, norm = zip(*((sum(n for _, n in one.tensors), _norm(one)) for one in (track, handed)), strict=True)
    return size[0] == size[1] and math.isclose(*norm, rel_tol=ALIKE)


def _norm(track: Track) -> float:
    """Of all tensors as the first step began; each of which a sample is kept stands for all of its elements."""
    first = track.steps[0]
    shares = [n / kept if kept else 1.0 for (_, n), kept in zip(first.tensors, first.counts, strict=True)]
    return norm(norms_by(first.counts, first.before) * np.sqrt(shares))
