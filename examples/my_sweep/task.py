"""Your task: exchange the four methods for your own data, model and loss."""

import torch
import torch.nn.functional as F
from torch import nn


class MyTask:
    """Two interleaved spirals; `width` is an argument that a sweep may vary."""

    def __init__(self, width=32):
        self.width = width
        turns = torch.linspace(0.5, 3.5, 320)
        arms = [torch.stack([turns * (turns * 2 + phase).cos(), turns * (turns * 2 + phase).sin()], 1) for phase in (0.0, 3.14)]
        points = torch.cat(arms) + 0.05 * torch.randn(640, 2, generator=torch.Generator().manual_seed(0))
        order = torch.randperm(640, generator=torch.Generator().manual_seed(1)).tolist()
        self.samples = [(points[i], i // 320) for i in order]

    def model(self, norm):
        """A fresh model, drawn from torch's global generator (the harness has seeded it)."""
        width = self.width
        return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))

    def train(self):
        """Anything with len() and [i]."""
        return self.samples[:512]

    def held_out(self):
        """The same, of samples that are not trained on."""
        return self.samples[512:]

    def losses(self, outputs, batch):
        """[n]: one number for each row, summed over its terms where it has several (then say `terms(batch)`)."""
        return F.cross_entropy(outputs, batch[1], reduction="none")

    def correct(self, outputs, batch):
        """[n], for accuracy; may be left out."""
        return outputs.argmax(1) == batch[1]
