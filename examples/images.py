"""Images, a model with BatchNorm, and an optimizer of one's own.

    accumulation-harness run -m workload=custom workload.target=examples/images.py:Digits norm=as_is,group \
        optimizer=custom optimizer.target=examples/images.py:Lion optimizer.lr=3e-4

Expect: `different (batch_statistics)` as the model is, `equivalent` with its BatchNorm layers exchanged for GroupNorm.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Digits:
    """1,797 images of 8x8 pixels; the last 297 are held out."""

    def __init__(self, width=8):
        table = load_digits()
        images = torch.tensor(table.images, dtype=torch.float32).unsqueeze(1) / 16
        self.samples = list(zip(images, table.target.tolist(), strict=True))
        self.width = width

    def model(self, norm):  # the harness exchanges BatchNorm where `norm` asks for it
        width = self.width
        return nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, stride=2, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(18 * width, 10)),
        )

    def train(self):
        return self.samples[:1500]

    def held_out(self):
        return self.samples[1500:]

    def losses(self, outputs, batch):  # one number for each row, never their mean
        return F.cross_entropy(outputs, batch[1], reduction="none")

    def correct(self, outputs, batch):
        return outputs.argmax(1) == batch[1]


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv:2302.06675."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(momentum.lerp(p.grad, 1 - group["betas"][0]).sign(), alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - group["betas"][1])
