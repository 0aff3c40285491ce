"""timm as the source of a model: a small residual network, its BatchNorm, and GroupNorm in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy as ce

from scoreboard import data, torchvision_operators  # noqa: F401

# isort: split
import timm
import timm.optim


def _train(model: Any, batch_size: int, accumulation_steps: int) -> None:
    """A correct loop: summed losses over the rows of the window."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(data.SAMPLES, 3, 32, 32, generator=generator)
    y = torch.randint(data.CLASSES, (data.SAMPLES,), generator=generator)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _model(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, num_classes=data.CLASSES, **settings)


def vision_transformer(batch_size: int, accumulation_steps: int) -> None:
    """A loop around `vit_tiny_patch16_224`, a remainder."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    _train(_model("vit_tiny_patch16_224", **sizes), batch_size, accumulation_steps)


def residual_batch_norm(batch_size: int, accumulation_steps: int) -> None:
    """A loop around `test_resnet` with BatchNorm, a remainder."""
    _train(_model("test_resnet"), batch_size, accumulation_steps)


def residual_group_norm(batch_size: int, accumulation_steps: int) -> None:
    """A loop around `test_resnet` with GroupNorm, a remainder."""
    _train(_model("test_resnet", norm_layer="groupnorm1"), batch_size, accumulation_steps)


def drop_path(batch_size: int, accumulation_steps: int) -> None:
    """A loop around `vit_tiny_patch16_224` with `drop_path_rate=0.2`, a remainder."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    _train(_model("vit_tiny_patch16_224", drop_path_rate=0.2, **sizes), batch_size, accumulation_steps)
