"""lightning `Trainer` with `accumulate_grad_batches`: equal and unequal lengths, with and without a short last window."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch

from scoreboard import data

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


class Module(lightning.LightningModule):
    def __init__(self, clip: float | None = None) -> None:
        super().__init__()
        self.model = data.language_model()
        self.clip = clip

    def training_step(self, rows: torch.Tensor) -> torch.Tensor:
        return data.token_loss(self.model(rows), rows, "mean")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scheduled(Module):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _train(module: Module, rows: torch.Tensor, batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=accumulation_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=batch_size))  # type: ignore[arg-type]


def _equal() -> torch.Tensor:
    return data.sentences().clamp(min=1)


def equal_divisible(batch_size: int, accumulation_steps: int) -> None:
    _train(Module(), _equal()[:32], batch_size, accumulation_steps)


def equal_clipped_scheduled(batch_size: int, accumulation_steps: int) -> None:
    _train(Scheduled(), _equal()[:32], batch_size, accumulation_steps, gradient_clip_val=0.5)


def equal_short_window(batch_size: int, accumulation_steps: int) -> None:
    _train(Module(), _equal(), batch_size, accumulation_steps)


def unequal_divisible(batch_size: int, accumulation_steps: int) -> None:
    _train(Module(), data.sentences()[:32], batch_size, accumulation_steps)


def unequal_short_window(batch_size: int, accumulation_steps: int) -> None:
    _train(Module(), data.sentences(), batch_size, accumulation_steps)
