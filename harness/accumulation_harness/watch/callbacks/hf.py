"""Transformers' `Trainer`, and what is derived from it (TRL): `Trainer(..., callbacks=[WatchCallback()])`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

from accumulation_harness.observe.patches import Patches, Wrap
from accumulation_harness.watch.callbacks.kept import KeptWatch

if TYPE_CHECKING:

    class TrainerCallback:
        """Typed here: transformers is not installed with this package."""

else:
    from transformers import TrainerCallback


class WatchCallback(KeptWatch, TrainerCallback):
    """A callback that watches a `Trainer` of transformers or TRL.

    It prints a line on stderr as soon as something is wrong; `.report()` is the report, also while the training goes on.
    """

    def __init__(self, path: str | Path | None = None, **options: Any) -> None:
        """Create the callback.

        Args:
            path: Where the report is kept while the training goes on (.json or .md).
            **options: Those of `watch`; `loss` gets as batch the keywords of the model, as a dict.
        """
        super().__init__(path, **options)
        from transformers import Trainer

        patches = Patches()
        patches.replace({(Trainer, "train"): _ended_with(ref(self))})
        finalize(self, patches.restore)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        """Begin to watch."""
        self.begin(model, optimizer, args.gradient_accumulation_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Add `accumulation/*` to what the trainer logs, and so to whatever it reports to."""
        if logs is not None and "loss" in logs:
            logs.update(self.metrics())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End."""
        self.end()


def _ended_with(callback: ref[WatchCallback]) -> Wrap:
    """A training that ends otherwise, by an exception or Ctrl-C, tells no callback."""

    def wrap(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(trainer, *args, **kwargs)
        finally:
            own = callback()
            if own is not None and own in trainer.callback_handler.callbacks:
                own.end()

    return wrap
