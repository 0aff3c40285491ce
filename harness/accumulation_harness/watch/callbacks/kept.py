"""What the callbacks of all trainers have in common: the watch, begun and ended by the trainer, and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accumulation_harness.watch.report import Report
from accumulation_harness.watch.session import Watch, watch


class KeptWatch:
    """A watch that is begun with a training and ended with it."""

    def __init__(self, path: str | Path | None = None, **options: Any) -> None:
        """`path`: where the report is written when training ends; `options`: those of `watch`."""
        self.path, self.options = path, options
        self.seen: Watch | None = None

    def begin(self, model: Any, optimizer: Any, accumulation_steps: int) -> None:
        """Attach: the optimizers exist by now."""
        self.seen = watch(model, optimizer, **{"accumulation_steps": accumulation_steps, **self.options}).attach()

    def end(self, *, writes: bool) -> None:
        """Detach, and write the report where this process `writes`."""
        if self.seen is not None:
            self.seen.detach()
            if self.path is not None and writes:
                self.seen.report(self.path)

    def metrics(self) -> dict[str, float]:
        """`accumulation/*` as far as there are numbers; none before training has begun."""
        return {} if self.seen is None else dict(self.seen.metrics())

    def report(self) -> Report:
        """What is known now; raises ValueError before training has begun."""
        if self.seen is None:
            raise ValueError("report: expected a training that has begun, got none")
        return self.seen.report()
