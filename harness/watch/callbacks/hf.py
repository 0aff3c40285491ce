"""Transformers' `Trainer`, and what is derived from it (TRL): `Trainer(..., callbacks=[WatchCallback()])`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.watch.report import Report
from harness.watch.session import Watch, watch

if TYPE_CHECKING:

    class TrainerCallback:
        """Typed here: transformers is not installed with this package."""

else:
    from transformers import TrainerCallback


class WatchCallback(TrainerCallback):
    """Watches a `Trainer`; `.report()` when it has ended, and a line on the terminal when something is wrong."""

    def __init__(self, path: str | Path | None = None, **options: Any) -> None:
        """`path`: where the report is written when training ends; `options`: those of `watch`."""
        self.path, self.options = path, options
        self.seen: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        """Attach: the optimizer exists by now."""
        steps = args.gradient_accumulation_steps
        self.seen = watch(model, optimizer, **{"accumulation_steps": steps, **self.options}).attach()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add `accumulation/*` to what the trainer logs, and so to whatever it reports to."""
        if self.seen is not None and logs is not None and "loss" in logs:
            logs.update({name: value for name, value in self.seen.judge.metrics().items() if value == value})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Detach, and write the report."""
        if self.seen is not None:
            self.seen.detach()
            if self.path is not None and state.is_world_process_zero:
                self.seen.report(self.path)

    def report(self) -> Report:
        """What is known now; raises ValueError before training has begun."""
        if self.seen is None:
            raise ValueError("report: expected a training that has begun, got none")
        return self.seen.report()
