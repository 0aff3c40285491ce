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


class Adversaries(lightning.LightningModule):
    """A generator and a discriminator with an optimizer each, stepped by hand as the documentation accumulates by hand."""

    def __init__(self, accumulation_steps: int) -> None:
        super().__init__()
        self.automatic_optimization, self.accumulation_steps = False, accumulation_steps
        torch.manual_seed(0)
        self.generator, self.discriminator = torch.nn.Linear(4, data.FEATURES), torch.nn.Linear(data.FEATURES, 1)

    def training_step(self, rows: Any, batch_idx: int) -> None:
        real, noise = rows
        judged = torch.nn.functional.binary_cross_entropy_with_logits
        steps: Any = self.optimizers()
        for optimizer, generating in zip(steps, (True, False), strict=True):
            made = self.discriminator(self.generator(noise) if generating else self.generator(noise).detach())
            loss = judged(made, torch.ones_like(made) if generating else torch.zeros_like(made))
            if not generating:
                loss = loss + judged(self.discriminator(real), torch.ones_like(made))
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss / self.accumulation_steps)
            if (batch_idx + 1) % self.accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]


def adversaries(batch_size: int, accumulation_steps: int) -> None:
    """Manual optimization of a generator and a discriminator, whose updates alternate within a batch; divisible."""
    inputs, _ = data.images()
    noise = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))
    rows = torch.utils.data.TensorDataset(inputs[:32], noise)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Adversaries(accumulation_steps), torch.utils.data.DataLoader(rows, batch_size=batch_size))
