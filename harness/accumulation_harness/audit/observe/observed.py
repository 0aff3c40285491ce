"""What the observers of one run share: the tracks of its optimizers, its forwards, the loss scale and the intervention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR
from torch.optim.optimizer import Optimizer

from accumulation_harness.audit.evidence import Call, Intervention, Role, Run
from accumulation_harness.audit.observe.foreign import Foreign
from accumulation_harness.audit.observe.forwards import Forwards
from accumulation_harness.audit.observe.interventions import intervene
from accumulation_harness.audit.observe.live import LiveTrack
from accumulation_harness.audit.observe.states import States
from accumulation_harness.observe.fence import Fence


class Observed:
    """The state of one watched run; every wrapper and hook reads it and adds to it."""

    def __init__(self, run: Run, intervention: Intervention, fence: Fence) -> None:
        self.run, self.intervention, self.fence = run, intervention, fence
        self.forwards = Forwards(run, fence)
        self.states = States(run, intervention)
        self.schedules: list[object] = []  # that have advanced
        self.scalers: list[object] = []
        self.window_over = True  # whether nothing of the window that follows the last step has begun
        self.live: dict[int, LiveTrack] = {}  # by the optimizer's identity
        self.found: set[int] = set()  # of these, those that were there before the function was called
        self.loss_scale = 1.0  # of a GradScaler
        self.backward_depth = 0  # differentiations under way; those inside another one are none of the loop's
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
            self.states.seen.clear()
            self.window_over = True
            self.prepared.clear()
        self.add(optimizer)

    def begin_window(self) -> None:
        """Something of a window comes: what is held in numbers is looked at once."""
        if self.window_over:
            self.window_over = False
            self.states.look(self.known)

    @property
    def known(self) -> dict[Role, list[object]]:
        """What has a role in training."""
        optimizers: list[object] = [live.optimizer for live in self.lives]
        models: list[object] = [*self.forwards.outermost.values()]
        weights: list[object] = [p for live in self.lives for p in live.parameters]
        of_functions: list[object] = [one for one in self.schedules if isinstance(one, (LambdaLR, MultiplicativeLR))]
        others = [one for one in self.schedules if not isinstance(one, (LambdaLR, MultiplicativeLR))]
        return {
            "model": models,
            "optimizer": optimizers,
            "schedule": others,
            "function": of_functions,
            "scaler": self.scalers,
            "weight": weights,
        }

    def holding(self, tensors: Iterable[Tensor], owner: object = None) -> list[LiveTrack]:
        """The tracks that have one of these parameters, or this optimizer."""
        members = set(map(id, tensors))
        return [
            live for live in self.live.values() if live.optimizer is owner or not members.isdisjoint(map(id, live.parameters))
        ]

    def note(self, call: Call) -> None:
        """Add to the order of calls of every optimizer's window."""
        for live in self.live.values():
            live.note(call)

    def settle(self, live: LiveTrack) -> None:
        """After a step of this optimizer: its window is over; put the weights that the intervention asks for."""
        if live is self.leading and not self.backward_depth:
            self.forwards.end_window()
            self.window_over = True
        intervene(live, self.intervention, self.lives.index(live), live.num_effective - 1)
