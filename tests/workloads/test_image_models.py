"""Parts of the image models: biases and pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from accumulation_harness.config import OUR_NORMS, Norm
from accumulation_harness.workloads.image_models import make_conv, make_resnet18, pooling


def convolutions(net: nn.Module) -> Iterator[nn.Conv2d]:
    return (module for module in net.modules() if isinstance(module, nn.Conv2d))


@pytest.mark.parametrize("make", [make_conv, make_resnet18])
def test_convolutions_have_a_bias_without_normalisation_only(make: Callable[..., nn.Module]) -> None:
    for norm in OUR_NORMS:
        assert all((conv.bias is not None) == (norm == Norm.none) for conv in convolutions(make((1, 8, 8), width=1, norm=norm)))


@pytest.mark.parametrize("side", [4, 8, 14, 16, 31])
def test_pooling_gives_four_by_four_and_sees_every_pixel(side: int) -> None:
    maps = torch.ones(1, 1, side, side, requires_grad=True)
    pooled = nn.Sequential(*pooling(side))(maps)
    assert pooled.shape == (1, 1, 4, 4)
    assert (torch.autograd.grad(pooled.sum(), maps)[0] > 0).all()
    if side % 4 == 0:
        random = torch.randn(2, 3, side, side)
        assert torch.allclose(nn.Sequential(*pooling(side))(random), nn.functional.adaptive_avg_pool2d(random, 4), atol=1e-6)
