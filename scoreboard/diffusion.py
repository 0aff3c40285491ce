"""A loop as diffusers' scripts have it: accelerate, `UNet2DModel`, `DDPMScheduler`; noise and timesteps are drawn."""

from __future__ import annotations

import warnings
from typing import Any

import diffusers
import torch
from torch.nn import functional

from scoreboard import accelerate_loops

warnings.simplefilter("ignore")
diffusers.utils.logging.set_verbosity_error()
ROWS, SIDE = 32, 8


def _images() -> torch.Tensor:
    return torch.randn(ROWS, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def _model() -> Any:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    return diffusers.UNet2DModel(
        sample_size=SIDE, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4, add_attention=False, **blocks
    )


def _train(batch_size: int, accumulation_steps: int, drawn: Any, *, divided: bool = True) -> None:
    """`drawn(rows)` gives noise and timesteps of a micro-batch."""
    accelerate_loops._forget()
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=accumulation_steps, cpu=True)
    model, images, schedule = _model(), _images(), diffusers.DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(range(ROWS), batch_size=batch_size)  # type: ignore[arg-type, var-annotated]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for rows in loader:
            noise, timesteps = drawn(rows)
            with accelerator.accumulate(model):
                predicted = model(schedule.add_noise(images[rows], noise, timesteps), timesteps).sample
                accelerator.backward(functional.mse_loss(predicted, noise))
                optimizer.step()
                optimizer.zero_grad()


def _by_row(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = []
    for row in rows.tolist():
        generator = torch.Generator().manual_seed(100 + row)
        made.append((torch.randn(1, SIDE, SIDE, generator=generator), torch.randint(100, (), generator=generator)))
    noise, timesteps = zip(*made, strict=True)
    return torch.stack(noise), torch.stack(timesteps)


def drawn(batch_size: int, accumulation_steps: int) -> None:
    """Noise and timesteps are drawn for each micro-batch from the process's own generator, as the scripts do; divisible."""
    torch.manual_seed(5)
    _train(batch_size, accumulation_steps, lambda rows: (torch.randn(len(rows), 1, SIDE, SIDE), torch.randint(100, (len(rows),))))


def drawn_by_row(batch_size: int, accumulation_steps: int) -> None:
    """Noise and timesteps of a row are drawn from a generator of its own; divisible."""
    _train(batch_size, accumulation_steps, _by_row)
