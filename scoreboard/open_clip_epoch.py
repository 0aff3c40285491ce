"""open_clip's `train_one_epoch`, whose `accum_freq` micro-batches share their features: CLIP's loss and SigLIP's, tiny towers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from scoreboard import data, torchvision_operators  # noqa: F401

# isort: split
from open_clip.loss import ClipLoss, SigLipLoss
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from open_clip_train.train import train_one_epoch

logging.disable(logging.WARNING)

SIZE, CONTEXT = 8, 6  # pixels per side, tokens per caption


class Loader(torch.utils.data.DataLoader[Any]):
    """The two counts that `train_one_epoch` reads."""

    @property
    def num_batches(self) -> int:
        return len(self)

    @property
    def num_samples(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


def _pairs(rows: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(rows, 3, SIZE, SIZE, generator=generator)
    return torch.utils.data.TensorDataset(images, torch.randint(1, data.VOCABULARY, (rows, CONTEXT), generator=generator))


def _model(bias: float | None) -> CLIP:
    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=1, width=16, head_width=8, image_size=SIZE, patch_size=4)
    captions = CLIPTextCfg(context_length=CONTEXT, vocab_size=data.VOCABULARY, width=16, heads=2, layers=1)
    scale = np.log(10) if bias is not None else np.log(1 / 0.07)  # as the package sets them for SigLIP and for CLIP
    return CLIP(8, vision, captions, init_logit_scale=scale, init_logit_bias=bias, output_dict=True)


def _train(
    batch_size: int,
    accumulation_steps: int,
    loss: Any,
    *,
    rows: int = 32,
    bias: float | None = None,
    clip: float | None = None,
    divisor: int = 1,
) -> None:
    model = _model(bias)
    model.logit_scale.register_hook(lambda gradient: gradient / divisor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = SimpleNamespace(
        accum_freq=accumulation_steps,
        batch_size=batch_size,
        device="cpu",
        distill=False,
        grad_clip_norm=clip,
        horovod=False,
        log_every_n_steps=1000,
        precision="fp32",
        rank=0,
        local_rank=0,
        skip_scheduler=True,
        wandb=False,
        world_size=1,
    )
    loader = SimpleNamespace(dataloader=Loader(_pairs(rows), batch_size), set_epoch=lambda epoch: None)
    for epoch in range(data.EPOCHS):
        train_one_epoch(model, {"train": loader}, loss, epoch, optimizer, None, None, None, arguments)


def clip_loss(batch_size: int, accumulation_steps: int) -> None:
    """`ClipLoss`, divisible."""
    _train(batch_size, accumulation_steps, ClipLoss())


def clip_loss_scale_divided(batch_size: int, accumulation_steps: int) -> None:
    """`ClipLoss`, the gradient of `logit_scale` divided by N in a hook, divisible."""
    _train(batch_size, accumulation_steps, ClipLoss(), divisor=accumulation_steps)


def clip_loss_clipped(batch_size: int, accumulation_steps: int) -> None:
    """`ClipLoss`, `grad_clip_norm=1`, divisible."""
    _train(batch_size, accumulation_steps, ClipLoss(), clip=1.0)


def clip_loss_remainder(batch_size: int, accumulation_steps: int) -> None:
    """`ClipLoss`, a remainder."""
    _train(batch_size, accumulation_steps, ClipLoss(), rows=40)


def sigmoid_loss(batch_size: int, accumulation_steps: int) -> None:
    """`SigLipLoss`, with a bias, divisible."""
    _train(batch_size, accumulation_steps, SigLipLoss(), bias=-10.0)
