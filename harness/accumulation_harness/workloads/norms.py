"""The normalisations compared: each a layer for feature maps or for feature vectors."""

from __future__ import annotations

from torch import nn

from accumulation_harness.config import Norm


def make_norm(norm: Norm, channels: int, dims: int, *, max_groups: int = 4) -> nn.Module:
    """The layer for [n, channels] (dims=0) or [n, channels, H, W] (dims=2).

    `batch` couples the samples of a batch; the others do not. `group` takes the largest divisor of `channels` up to
    `max_groups` (32 in Wu & He, arXiv:1803.08494). `layer` on feature maps is GroupNorm with one group: mean and variance
    over all of C, H, W, scale and shift per channel.
    """
    if dims not in (0, 2):
        raise ValueError(f"expected dims 0 or 2, got {dims}")
    match norm:
        case Norm.as_is:
            raise ValueError("expected a normalisation to be made, got as_is, which is a model's own")
        case Norm.none:
            return nn.Identity()
        case Norm.batch:
            return nn.BatchNorm2d(channels) if dims else nn.BatchNorm1d(channels)
        case Norm.group:
            groups = max(g for g in range(1, max_groups + 1) if channels % g == 0)
            return nn.GroupNorm(groups, channels)
        case Norm.layer:
            return nn.GroupNorm(1, channels) if dims else nn.LayerNorm(channels)
