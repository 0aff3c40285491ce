"""Normalisations of feature maps, from their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accumulation_harness.config import Norm
from accumulation_harness.workloads.norms import make_norm

GROUPS = [(8, 4, 4), (6, 4, 3), (7, 4, 1), (1, 4, 1), (64, 32, 32), (24, 32, 24), (40, 32, 20)]


@pytest.mark.parametrize(("channels", "most", "groups"), GROUPS)
def test_group_norm_takes_the_largest_divisor(channels: int, most: int, groups: int) -> None:
    norm = make_norm(Norm.group, channels, 2, max_groups=most)
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == groups


def test_layer_norm_of_maps_is_over_channels_and_places() -> None:
    maps = torch.randn(3, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, variance = maps.mean((1, 2, 3), keepdim=True), maps.var((1, 2, 3), correction=0, keepdim=True)
    assert torch.allclose(make_norm(Norm.layer, 4, 2).double()(maps), (maps - mean) / (variance + 1e-5).sqrt(), rtol=1e-12)
