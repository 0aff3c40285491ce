"""Lightning: `Trainer(..., callbacks=[WatchCallback()])`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accumulation_harness.watch.callbacks.kept import KeptWatch

if TYPE_CHECKING:

    class Callback:
        """Typed here: lightning is not installed with this package."""

else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        from pytorch_lightning.callbacks import Callback


class WatchCallback(KeptWatch, Callback):
    """A callback that watches a `Trainer` of Lightning; `.report()` is the report, also while the training goes on."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        steps = trainer.accumulate_grad_batches if pl_module.automatic_optimization else None  # else it is the module's own
        self.begin(pl_module, trainer.optimizers, steps)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Hand the batch over, for a replay: with `loss=lambda module, batch: ...`."""
        if self.seen is not None:
            self.seen.batch(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Lightning runs the last backward of a window inside the optimizer's step."""
        if self.seen is not None:
            self.seen.closure_ran(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log `accumulation/*` with the module's own metrics."""
        if self.seen is not None and trainer.logger is not None:
            pl_module.log_dict(self.metrics(), logger=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End."""
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End; the report stays."""
        self.end()
