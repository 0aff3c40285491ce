"""The averaged copies of one optimizer's weights: what they were as each window began, and when they changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.audit.evidence import Copy, Step
from harness.audit.observe import shadows
from harness.audit.observe.shadows import Shadow
from harness.audit.observe.weights import put


class Averages:
    """Looks at the copies between events, and writes what it sees into the optimizer's `steps`."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self.shadows: Sequence[Shadow] = ()
        self.checksums: tuple[float, ...] = ()  # of the copies, as they were last seen
        self._moving: set[int] = set()  # places of the copies that have changed

    def see(self, *, window_begun: bool) -> None:
        """`window_begun`: a backward of the window under way has been seen."""
        if not self.shadows:
            return
        copies = tuple(shadow.copied() for shadow in self.shadows)
        sums = tuple(float(copy.values.sum()) for copy in copies)
        if self.steps and not window_begun and not self.steps[-1].shadows:
            self.steps[-1] = replace(self.steps[-1], shadows=copies)
        if self.checksums and sums != self.checksums:
            self._moving |= {place for place, (a, b) in enumerate(zip(sums, self.checksums, strict=True)) if a != b}
            if self.steps:
                self.steps[-1] = replace(self.steps[-1], shadow_updates=self.steps[-1].shadow_updates + 1)
        self.checksums = sums

    def finish(self) -> None:
        """The function has returned: copies that never changed are somebody's, but no averages."""
        if self._moving:
            for t, step in enumerate(self.steps):
                averages = tuple(copy for place, copy in enumerate(step.shadows) if place in self._moving)
                self.steps[t] = replace(step, shadows=averages)

    def put(self, wanted: Sequence[Copy]) -> None:
        """Write these values into the copies nearest to them."""
        for copy in wanted:
            shadow = shadows.nearest(self.shadows, copy)
            if shadow is not None:
                put(shadow.tensors, copy.values)
