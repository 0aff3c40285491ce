"""What the scripts of this folder train, so that each of them is its own manner of training and little else."""

import torch
from torch import nn

CLASSES = 3


def data(rows: int = 88) -> torch.utils.data.Dataset:
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(
        torch.randn(rows, 6, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)
    )


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))
