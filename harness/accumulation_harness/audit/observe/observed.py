"""What the observers of one run share: the tracks of its optimizers, its forwards, the loss scale and the intervention."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from accumulation_harness.audit.evidence import Call, Intervention, Role, Run, Term
from accumulation_harness.audit.observe.forwards import Forwards
from accumulation_harness.audit.observe.frames import callers
from accumulation_harness.audit.observe.interventions import intervene, lend
from accumulation_harness.audit.observe.live import Foreign, LiveTrack, Unclipped
from accumulation_harness.audit.observe.loss_graph import (
    coupled_copies,
    couplings,
    gradients_by_term,
    mixes_rows,
    slopes_by_term,
    term_names,
)
from accumulation_harness.audit.observe.states import States
from accumulation_harness.audit.observe.tensors import dense, tensors_in, vector
from accumulation_harness.observe.fence import Fence, See, Seeing
from accumulation_harness.observe.loop import Loop
from accumulation_harness.observe.patches import Place
from accumulation_harness.observe.tensors import in_a_group


class Observed(Loop[LiveTrack]):
    """The state of one watched run; every wrapper and hook reads it and adds to it."""

    def __init__(self, run: Run, intervention: Intervention, fence: Fence, find_optimizers: Callable[[], None]) -> None:
        """`find_optimizers` adds the optimizers that were made before anybody watched."""
        self.find_optimizers = find_optimizers
        self.run, self.intervention, self.fence = run, intervention, fence
        self.forwards = Forwards(run, fence)
        self.states = States(run, intervention, self.forwards.generators)
        self.schedules: dict[int, object] = {}  # that have advanced
        self.scalers: dict[int, object] = {}
        self.waits, self.due = False, list[LiveTrack]()  # whether the loop hands over its weights first
        self.window_over = True  # whether nothing of the window that follows the last step has begun
        self.live: dict[int, LiveTrack] = {}  # by the optimizer's identity
        self.found: set[int] = set()  # of these, those that were there before the function was called
        self.loss_scale = 1.0  # of a GradScaler
        self.differentiations = 0  # so far
        self.backward_depth = 0  # differentiations under way; those inside another one are none of the loop's
        self.give_back = _nothing  # the weights of a window whose first micro-batch meets others
        self.prepared: set[int] = set()  # optimizers whose starting weights the intervention has put

    @property
    def lives(self) -> list[LiveTrack]:
        """The tracks in the order in which their optimizers were made; last those that may be none of the function's."""
        return sorted(self.live.values(), key=self.is_found)

    @property
    def leading(self) -> LiveTrack | None:
        """The track of the function's first optimizer; None before there is one.

        One that was there before the function was called is the function's own once a backward has reached it.
        """
        lives = self.lives
        return next((live for live in lives if not self.is_found(live) or live.track.first_backward), lives[0] if lives else None)

    @property
    def at(self) -> tuple[int, int]:
        """The window under way, and its micro-batch: of the first optimizer, or so far, where none is made yet."""
        leading = self.leading
        return (len(leading.track.steps), len(leading.window.backwards)) if leading else (0, self.differentiations)

    def is_found(self, live: LiveTrack) -> bool:
        """Whether its optimizer was there before the function was called; it may be another program's, and is left alone then."""
        return id(live.optimizer) in self.found

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """While something is differentiated; backwards inside are none of the loop's."""
        self.backward_depth += 1
        try:
            yield
        finally:
            self.backward_depth -= 1

    def add(self, optimizer: Optimizer | Foreign) -> LiveTrack:
        """The track of an optimizer, made when first seen; its parameters are looked up again until it steps."""
        live = self.live.get(id(optimizer))
        if live is None:
            live = self.live[id(optimizer)] = LiveTrack(optimizer, self.run, self.forwards, self.intervention, self.fence)
        return live

    def made(self, optimizer: Optimizer) -> None:
        """An optimizer is being made, or gets more parameters. A forward before the first one (for shapes) is of no window."""
        begun = self.run.backwards or any(live.window.backwards or live.track.steps for live in self.live.values())
        if id(optimizer) not in self.live and not begun:
            self.forwards.begin()
            self.states.restart()
            self.window_over = True
            self.prepared.clear()
        self.add(optimizer)

    def begin_window(self, model: nn.Module | None = None) -> None:
        """Something of a window comes, a forward of this model: what is held in numbers is looked at once."""
        self.put_weights()
        if self.window_over:
            self.window_over = False
            known = self.known
            found = self.states.look(known)
            self.forwards.paths |= {id(p): found[id(p)] for p in known["weight"] if id(p) in found}
            if self.intervention.leaves == self.at[0] and not self.at[1]:
                self.give_back = lend(self.lives, model)

    @property
    def known(self) -> dict[Role, list[object]]:
        """What has a role in training."""
        of_functions = {key: isinstance(one, (LambdaLR, MultiplicativeLR)) for key, one in self.schedules.items()}
        return {
            "model": [*self.forwards.outermost.values()],
            "optimizer": [one.optimizer if isinstance(one := live.optimizer, Foreign) else one for live in self.lives],
            "state": [live.optimizer.state for live in self.lives],
            "schedule": [one for key, one in self.schedules.items() if not of_functions[key]],
            "function": [one for key, one in self.schedules.items() if of_functions[key]],
            "scaler": [*self.scalers.values()],
            "weight": [p for live in self.lives for p in live.parameters],
        }

    def note(self, call: Call) -> None:
        """Add to the order of calls of every optimizer's window."""
        for live in self.live.values():
            live.note(call)

    def settle(self, live: LiveTrack) -> None:
        """After a step of this optimizer: its window is over; put the weights that the intervention asks for."""
        if live is self.leading and not self.backward_depth:
            self.forwards.end_window()
            self.window_over = True
            if self.intervention.redraw == len(live.track.steps):
                self.forwards.generators.advance()
        self.due.append(live)
        if not self.waits:
            self.put_weights()

    def put_weights(self) -> None:
        """Of what has stepped, those that the intervention asks for."""
        while self.due:
            live = self.due.pop()
            intervene(live, self.intervention, self.lives.index(live), live.num_effective - 1)

    # -- calls of the loop ---------------------------------------------------------------------------------------------

    def calls(self) -> dict[Place, See]:
        """Those of any observer, and who clears, loads and makes."""
        return {
            **super().calls(),
            (Optimizer, "add_param_group"): self._add_param_group,
            (DataLoader, "__iter__"): self._iterated,
            (Optimizer, "zero_grad"): self._noting_owner("zero_grad"),
            (nn.Module, "zero_grad"): self._noting_owner("zero_grad"),
            (Optimizer, "load_state_dict"): self._noting_owner("load"),
            (nn.Module, "load_state_dict"): self._noting_owner("load"),
        }

    @property
    def followed(self) -> Collection[LiveTrack]:
        """The optimizers that were seen so far."""
        return self.live.values()

    def _noting_owner(self, call: Call) -> See:
        """Only in the windows of the optimizer, or of those of the module's parameters."""

        def see(owner: Any, *_: Any, **__: Any) -> Seeing:
            held = self.holding(owner.parameters()) if isinstance(owner, nn.Module) else ()
            for live in held or (one for one in self.followed if one.optimizer is owner):
                live.note(call)
            yield

        return see

    def scheduled(self, scheduler: Any) -> None:
        """In the windows of all."""
        self.note("schedule")
        self.schedules[id(scheduler)] = scheduler

    def _iterated(self, loader: Any, *_: Any, **__: Any) -> Seeing:
        batches = loader.batch_sampler
        if getattr(batches, "drop_last", False) and isinstance(loader.dataset, Sized):
            self.run.dropped = max(self.run.dropped, len(loader.dataset) % batches.batch_size)
        yield

    def _add_param_group(self, optimizer: Any, *_: Any, **__: Any) -> Seeing:
        yield
        self.made(optimizer)

    # -- backward ----------------------------------------------------------------------------------------------------

    def differentiation(self, root: Any, inputs: list[Tensor] | None) -> Seeing:
        """A backward, or gradients that are returned."""
        if not self.backward_depth:  # checkpointing runs backward inside backward
            self.find_optimizers()
            yield from self._into_grad(root) if inputs is None else self._returned(root, inputs)
            self.differentiations += 1

    def _into_grad(self, root: Any) -> Seeing:
        self.begin_window()
        self.forwards.look_outside()
        self.run.callers = self.run.callers or tuple(callers())
        self.run.backwards += 1
        self.run.float16 |= any(t.dtype == torch.float16 for t in tensors_in(root))
        if not self.run.summed:
            self.run.summed = _is_sum(root)
        lives, probing = self.lives, self.forwards.probing
        if probing:
            self._probe(root)
        taken_apart = (probing or self.at[0] in (self.intervention.terms, self.intervention.probe)) and not in_a_group()
        terms = self._terms(root, lives) if taken_apart else [()] * len(lives)
        unowned = self._unowned()
        self.run.copies |= bool(unowned)
        for live in self.live.values():
            live.before_backward(unowned)
        with self.differentiating():
            yield
        loss = _total(root)
        reached = frozenset(i for i, live in enumerate(lives) if live.after_backward(loss, self.loss_scale))
        for i in reached:
            lives[i].reached_with(reached, terms[i])
        self.states.reached([id(p) for p in unowned] if any(live.window.through_model for live in lives) else ())
        self.give_back()
        self.give_back = _nothing
        self._end_of_backward()

    def _unowned(self) -> list[Tensor]:
        """The parameters of the model under way, where no optimizer holds any of them: it then holds copies (or none)."""
        owned = {id(p) for live in self.live.values() for p in live.parameters}
        model = self.forwards.first
        found: list[Tensor] = [p for p in model.parameters() if p.requires_grad] if model is not None else []
        return [] if any(id(p) in owned for p in found) else found

    def _terms(self, root: Any, lives: Sequence[LiveTrack]) -> list[tuple[Term, ...]]:
        """What each addend of the loss gives to each optimizer; none of it counts as a backward of the loop."""
        try:
            with self.differentiating():
                count, scale = self.forwards.count, self.loss_scale
                each = [gradients_by_term(root, live.parameters, count) for live in lives]
                return [tuple(term._replace(gradient=term.gradient / scale) for term in of_one) for of_one in each]
        except Exception:  # hooks in the graph that raise: nothing is known
            return [()] * len(lives)
        finally:
            self.forwards.forget_slopes()

    def _probe(self, root: Any) -> None:
        """Which rows the loss couples, and the slopes of its addends; none of it counts as a backward of the loop."""
        try:
            with self.differentiating():
                outputs = self.forwards.outputs
                tops = [output for _, output in outputs]
                self.run.mixes_rows |= mixes_rows(tops, [*self.forwards.made, *tops])
                bent = couplings(root, outputs)
                self.run.coupled |= bent.rows
                self.run.elementwise = bent.elementwise
                copies = coupled_copies(root, self.forwards.names)
                self.run.coupled_copies = max(self.run.coupled_copies, copies)
                if not in_a_group():
                    self.run.term_slopes.append(slopes_by_term(root, outputs, self.forwards.count))
        except Exception:  # a graph that cannot be differentiated twice, or hooks in it that raise: nothing is known
            self.run.term_slopes.append([])
        self.forwards.forget_slopes()

    def _returned(self, root: Any, inputs: Sequence[Tensor]) -> Seeing:
        places = {id(p): place for place, p in enumerate(inputs)}
        whole = [live for live in self.live.values() if live.parameters and all(id(p) in places for p in live.parameters)]
        unowned = [] if whole else self._unowned()
        copied = [live for live in self.live.values() if all(id(p) in places for p in unowned) and live.may_copy(unowned)]
        self.run.copies |= bool(copied)
        reached = [*whole, *copied]
        for live in reached:
            live.before_backward()
        aside = [] if reached else self.forwards.unreached
        result = yield
        for forward in aside:
            forward.reached = False
        for live in whole:
            manual = live.sample.take([result[places[id(p)]] for p in live.parameters])
            live.after_backward(_total(root), self.loss_scale, manual)
        for live in copied:
            live.window.through_model = True
            given = [result[places[id(p)]] for p in unowned]
            manual = live.sample.pick(
                vector(torch.zeros_like(p) if g is None else g for p, g in zip(unowned, given, strict=True))
            )
            live.after_backward(_total(root), self.loss_scale, manual)
        if reached:
            self._end_of_backward()

    def _end_of_backward(self) -> None:
        forwards = self.forwards
        forwards.reset()
        forwards.last = forwards.generators.standing()

    # -- between backward and step -----------------------------------------------------------------------------------

    def clipped(self, one: LiveTrack, before: Unclipped, limit: Any) -> None:
        """And what they were."""
        one.clipped(before, float(limit), self.loss_scale)

    def scaled(self, scaler: Any) -> None:
        """By so much."""
        self.scalers[id(scaler)] = scaler
        self.loss_scale = float(scaler.get_scale())

    def scale_updated(self) -> None:
        """In the windows of all."""
        self.note("update scale")

    def skipped(self, one: LiveTrack) -> None:
        """A step that took nothing."""
        one.skip()


def _nothing() -> None:
    """Is to be done."""


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
