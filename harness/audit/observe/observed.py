"""What the observers of one run share: the tracks of its optimizers, its forwards, the loss scale and the intervention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim.optimizer import Optimizer

from harness.audit.evidence import Call, Intervention, Run
from harness.audit.observe.foreign import Foreign
from harness.audit.observe.forwards import Forwards
from harness.audit.observe.interventions import intervene
from harness.audit.observe.live import LiveTrack


class Observed:
    """The state of one watched run; every wrapper and hook reads it and adds to it."""

    def __init__(self, run: Run, intervention: Intervention) -> None:
        self.run, self.intervention = run, intervention
        self.forwards = Forwards(run)
        self.live: dict[int, LiveTrack] = {}  # by the optimizer's identity, in the order in which they were made
        self.loss_scale = 1.0  # of a GradScaler
        self.backward_depth = 0  # differentiations under way; those inside another one are none of the loop's
        self.prepared = False  # whether the intervention has put its starting weights

    @property
    def leading(self) -> LiveTrack | None:
        """The track of the optimizer that was made first; None before there is one."""
        return next(iter(self.live.values()), None)

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
            live = self.live[id(optimizer)] = LiveTrack(optimizer, self.run, self.forwards, self.intervention)
        return live

    def made(self, optimizer: Optimizer) -> None:
        """An optimizer is being made, or gets more parameters. A forward before the first one (for shapes) is of no window."""
        begun = self.run.backwards or any(live.window.backwards or live.track.steps for live in self.live.values())
        if id(optimizer) not in self.live and not begun:
            self.forwards.begin()
            self.prepared = False
        self.add(optimizer)

    def note(self, call: Call) -> None:
        """Add to the order of calls of every optimizer's window."""
        for live in self.live.values():
            live.note(call)

    def settle(self, live: LiveTrack) -> None:
        """After a step of this optimizer: its window is over; put the weights that the intervention asks for."""
        if live is self.leading and not self.backward_depth:
            self.forwards.end_window()
        index = [*self.live].index(id(live.optimizer))
        intervene(live, self.intervention, index, live.num_effective - 1)
