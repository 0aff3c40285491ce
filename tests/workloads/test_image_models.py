"""Parts of the image models: biases and pooling."""

import pytest
import torch
from torch import nn

from accumulation_harness.workloads.image_models import pooling


@pytest.mark.parametrize("side", [4, 8, 14, 16, 31])
def test_pooling_gives_four_by_four_and_sees_every_pixel(side):
    maps = torch.ones(1, 1, side, side, requires_grad=True)
    pooled = nn.Sequential(*pooling(side))(maps)
    assert pooled.shape == (1, 1, 4, 4)
    assert (torch.autograd.grad(pooled.sum(), maps)[0] > 0).all()
    if side % 4 == 0:
        random = torch.randn(2, 3, side, side)
        assert torch.allclose(nn.Sequential(*pooling(side))(random), nn.functional.adaptive_avg_pool2d(random, 4), atol=1e-6)
