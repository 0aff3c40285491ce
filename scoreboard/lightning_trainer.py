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


def _train(module: Any, rows: Any, batch_size: int, accumulation_steps: int, **settings: Any) -> None:
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
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=batch_size))


class Gan(lightning.LightningModule):
    """Two optimizers stepped by hand, as the page on manual optimization has it: both once per `window` micro-batches."""

    def __init__(self, window: int, divisor: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.discriminator = torch.nn.Linear(4, data.FEATURES), torch.nn.Linear(data.FEATURES, 1)
        self.window, self.divisor = window, divisor

    def training_step(self, batch: list[torch.Tensor], place: int) -> None:
        noise, real = batch
        generators, discriminators = self.optimizers()  # type: ignore[misc]
        self._add(discriminators, self._judged(real, 1.0) + self._judged(self.generator(noise).detach(), 0.0), place)
        self._add(generators, self._judged(self.generator(noise), 1.0), place)

    def _judged(self, images: torch.Tensor, wanted: float) -> torch.Tensor:
        said = self.discriminator(images)
        return torch.nn.functional.binary_cross_entropy_with_logits(said, torch.full_like(said, wanted))

    def _add(self, optimizer: Any, loss: torch.Tensor, place: int) -> None:
        self.toggle_optimizer(optimizer)
        self.manual_backward(loss / self.divisor)
        if (place + 1) % self.window == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.discriminator)]


def _equal() -> torch.Tensor:
    return data.sentences().clamp(min=1)


def equal_divisible(batch_size: int, accumulation_steps: int) -> None:
    """Mean loss over equal lengths, divisible."""
    _train(Module(), _equal()[:32], batch_size, accumulation_steps)


def equal_clipped_scheduled(batch_size: int, accumulation_steps: int) -> None:
    """Mean loss over equal lengths, `gradient_clip_val=0.5`, an exponential schedule per step, divisible."""
    _train(Scheduled(), _equal()[:32], batch_size, accumulation_steps, gradient_clip_val=0.5)


def equal_short_window(batch_size: int, accumulation_steps: int) -> None:
    """Mean loss over equal lengths, a remainder."""
    _train(Module(), _equal(), batch_size, accumulation_steps)


def unequal_divisible(batch_size: int, accumulation_steps: int) -> None:
    """Mean loss over unequal lengths, divisible."""
    _train(Module(), data.sentences()[:32], batch_size, accumulation_steps)


def unequal_short_window(batch_size: int, accumulation_steps: int) -> None:
    """Mean loss over unequal lengths, a remainder."""
    _train(Module(), data.sentences(), batch_size, accumulation_steps)


def _gan(batch_size: int, accumulation_steps: int, divisor: int) -> None:
    images = data.images()[0][:32]
    noise = torch.randn(32, 4, generator=torch.Generator().manual_seed(4))
    _train(Gan(accumulation_steps, divisor), torch.utils.data.TensorDataset(noise, images), batch_size, 1)


def gan(batch_size: int, accumulation_steps: int) -> None:
    """A GAN by manual optimization, both losses divided by N as the documentation has it, divisible."""
    _gan(batch_size, accumulation_steps, accumulation_steps)


def gan_added(batch_size: int, accumulation_steps: int) -> None:
    """A GAN by manual optimization, the losses not divided, divisible."""
    _gan(batch_size, accumulation_steps, 1)
