"""What the callbacks of all trainers have in common: the watch, begun and ended by the trainer, and its report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accumulation_harness.watch.report import Report, check
from accumulation_harness.watch.session import Watch, watch


class KeptWatch:
    """What the callbacks of all trainers share: a watch that begins and ends with the training."""

    def __init__(self, path: str | Path | None = None, **options: Any) -> None:
        """Create the callback.

        Args:
            path: Where the report is kept while the training goes on (.json or .md).
            **options: Those of `watch`.

        Raises:
            ValueError: No report can be written to the path.
        """
        if path is not None:
            check(path)
        self.options = {"path": path, **options}
        self.seen: Watch | None = None
        self._refused = ""  # why nothing is watched

    def begin(self, model: Any, optimizer: Any, accumulation_steps: int | None) -> None:
        """Attach the watch to the optimizers, which exist by now.

        Args:
            model: The model that is trained.
            optimizer: Its optimizer, or several.
            accumulation_steps: The trainer's number of micro-batches, if it is known.
        """
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
        """Return the report so far.

        Returns:
            The report.

        Raises:
            ValueError: Training has not begun, or could not be watched.
        """
        if self._refused:
            return Report.ended(self._refused)
        if self.seen is None:
            raise ValueError("report: expected a training that has begun, got none")
        return self.seen.report()
