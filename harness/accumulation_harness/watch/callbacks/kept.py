"""What the callbacks of all trainers have in common: the watch, begun and ended by the trainer, and its report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accumulation_harness.watch.report import Report
from accumulation_harness.watch.session import Watch, watch


class KeptWatch:
    """A watch that is begun with a training and ended with it."""

    def __init__(self, path: str | Path | None = None, **options: Any) -> None:
        """`path`: where the report is kept while the training goes on; `options`: those of `watch`."""
        self.options = {"path": path, **options}
        self.seen: Watch | None = None
        self._refused = ""  # why nothing is watched

    def begin(self, model: Any, optimizer: Any, accumulation_steps: int) -> None:
        """Attach: the optimizers exist by now."""
        self.end()  # a trainer begins anew where it looks for a batch that fits
        try:
            self.seen = watch(model, optimizer, **{"accumulation_steps": accumulation_steps, **self.options}).attach()
        except ValueError as error:
            self._refused = f"nothing was watched: {error}"
            print(f"accumulation: {self._refused}", file=sys.stderr)

    def end(self) -> None:
        """Detach; the report stays."""
        if self.seen is not None:
            self.seen.detach()

    def metrics(self) -> dict[str, float]:
        """`accumulation/*` as far as there are numbers; none before training has begun."""
        return {} if self.seen is None else self.seen.metrics()

    def report(self) -> Report:
        """What is known now; raises ValueError before training has begun."""
        if self._refused:
            return Report.ended(self._refused)
        if self.seen is None:
            raise ValueError("report: expected a training that has begun, got none")
        return self.seen.report()
