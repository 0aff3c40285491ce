"""A loss with a term that couples the rows of a batch: a penalty on embeddings that are all alike (as in VICReg).

    accumulation-harness run workload=custom workload.target=examples/coupled_loss.py:Embeddings effective_batch=48
    accumulation-harness run workload=custom workload.target=examples/coupled_loss.py:Embeddings +workload.args.spread=0

Expect: `different (non_separable_loss)`: the spread of a micro-batch is not the spread of the batch. Without that term, which
is the second command, `equivalent`.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Embeddings:
    """Two noisy views of the same points are to have the same embedding."""

    def __init__(self, spread=1.0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        points = torch.randn(700, 12, generator=generator)
        views = [points + 0.1 * torch.randn(700, 12, generator=generator) for _ in range(2)]
        self.samples = list(zip(*views, strict=True))
        self.spread = spread

    def model(self, norm):
        return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 6))

    def train(self):
        return self.samples[:600]

    def held_out(self):
        return self.samples[600:]

    def forward(self, model, batch):  # the model is called twice: say how
        return {"left": model(batch[0]), "right": model(batch[1])}

    def losses(self, outputs, batch):
        left, right = outputs["left"], outputs["right"]
        deviation = (left.var(0, unbiased=False) + 1e-4).sqrt()  # over the rows: here they meet
        return (left - right).square().sum(1) + self.spread * F.relu(1 - deviation).mean()
