"""The oracles of in-batch negatives, against loops in numpy and against each other where they must agree."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accumulation_harness.config import Contrast
from accumulation_harness.referee.negatives import gradient_of, within_blocks

SIZES = [3, 1, 4]


class Linear(nn.Module):
    """[n, 2, 6] -> unit queries and passages, a temperature, a bias."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.left, self.right = (nn.Parameter(torch.randn(6, 3, dtype=torch.float64, generator=generator)) for _ in range(2))
        self.scale, self.bias = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (0.7, -0.4))

    def forward(self, x):
        return F.normalize(x[:, 0] @ self.left, dim=1), F.normalize(x[:, 1] @ self.right, dim=1), self.scale, self.bias


def inputs():
    return torch.randn(8, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_loops(model, x, sizes, contrast):
    """The mean over all rows of the loss of each within its block."""
    q, p, scale, bias = (one.detach().numpy() for one in model(x))
    total, start = 0.0, 0
    for size in sizes:
        block = range(start, start + size)
        for i in block:
            right = np.exp(scale) * q[i] @ p[i] + bias
            s = {j: np.exp(scale) * q[i] @ p[j] + bias for j in block}
            if contrast == Contrast.sigmoid:
                total += sum(np.log1p(np.exp(-v if j == i else v)) for j, v in s.items())
                continue
            forth = np.log(sum(np.exp(v) for v in s.values())) - right
            back = np.log(sum(np.exp(np.exp(scale) * q[j] @ p[i] + bias) for j in block)) - right
            total += forth if contrast == Contrast.one_sided else (forth + back) / 2
        start += size
    return total / len(x)


@pytest.mark.parametrize("contrast", Contrast)
def test_within_blocks(contrast):
    model, x = Linear(), inputs()
    loss, gradient = gradient_of(model, x, within_blocks(SIZES, contrast))
    assert loss == pytest.approx(by_loops(model, x, SIZES, contrast), rel=1e-13)
    whole, other = gradient_of(model, x, within_blocks([8], contrast))
    assert whole == pytest.approx(by_loops(model, x, [8], contrast), rel=1e-13) and abs(whole - loss) > 0.01
    assert float((gradient - other).norm()) > 0.01 * float(other.norm())
    edge = 1e-6
    with torch.no_grad():
        model.scale += edge
        up = by_loops(model, x, SIZES, contrast)
        model.scale -= 2 * edge
        down = by_loops(model, x, SIZES, contrast)
    place = model.left.numel() + model.right.numel()
    assert float(gradient[place]) == pytest.approx((up - down) / (2 * edge), rel=1e-6)
