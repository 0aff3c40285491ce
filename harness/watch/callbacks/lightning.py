"""Lightning: `Trainer(..., callbacks=[WatchCallback()])`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.watch.report import Report
from harness.watch.session import Watch, watch

if TYPE_CHECKING:

    class Callback:
        """Typed here: lightning is not installed with this package."""

else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        from pytorch_lightning.callbacks import Callback


class WatchCallback(Callback):
    """Watches a `Trainer`; `.report()` when it has ended."""

    def __init__(self, path: str | Path | None = None, **options: Any) -> None:
        """`path`: where the report is written when training ends; `options`: those of `watch`."""
        self.path, self.options = path, options
        self.seen: Watch | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: the optimizers exist by now."""
        options = {"accumulation_steps": trainer.accumulate_grad_batches, **self.options}
        self.seen = watch(pl_module, trainer.optimizers, **options).attach()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Lightning runs the last backward of a window inside the optimizer's step."""
        if self.seen is not None:
            self.seen.closure_ran(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log `accumulation/*` with the module's own metrics."""
        if self.seen is not None and trainer.logger is not None:
            metrics = {name: value for name, value in self.seen.judge.metrics().items() if value == value}
            pl_module.log_dict(metrics, logger=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach, and write the report."""
        if self.seen is not None:
            self.seen.detach()
            if self.path is not None and trainer.is_global_zero:
                self.seen.report(self.path)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach; the report stays."""
        if self.seen is not None:
            self.seen.detach()

    def report(self) -> Report:
        """What is known now; raises ValueError before training has begun."""
        if self.seen is None:
            raise ValueError("report: expected a training that has begun, got none")
        return self.seen.report()
