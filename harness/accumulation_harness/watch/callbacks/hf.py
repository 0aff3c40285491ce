"""Transformers' `Trainer`, and what is derived from it (TRL): `Trainer(..., callbacks=[WatchCallback()])`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accumulation_harness.watch.callbacks.kept import KeptWatch

if TYPE_CHECKING:

    class TrainerCallback:
        """Typed here: transformers is not installed with this package."""

else:
    from transformers import TrainerCallback


class WatchCallback(KeptWatch, TrainerCallback):
    """Watches a `Trainer`; `.report()` when it has ended, and a line on the terminal when something is wrong."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        """Begin to watch."""
        self.begin(model, optimizer, args.gradient_accumulation_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add `accumulation/*` to what the trainer logs, and so to whatever it reports to."""
        if logs is not None and "loss" in logs:
            logs.update(self.metrics())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End, and write the report."""
        self.end(writes=state.is_world_process_zero)
