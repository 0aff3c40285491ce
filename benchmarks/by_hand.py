"""The sweep that one writes by hand: Hydra's basic launcher, one job per cell, the full batch and then the accumulated run.

`python benchmarks/by_hand.py -m norm=none,batch precision=float32,float16 accumulation_steps=2,4,8,16` trains what
`accumulation-harness run` trains for the same settings, and logs losses and gradient norms to W&B, offline.
"""

from __future__ import annotations

from dataclasses import dataclass

import hydra
import numpy as np
import torch
import torch.nn.functional as F
import wandb
from hydra.core.config_store import ConfigStore
from sklearn.datasets import load_digits
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Config:
    """A cell of the grid."""

    norm: str = "none"
    precision: str = "float32"
    accumulation_steps: int = 4
    steps: int = 100
    folder: str = "."


def make_model(norm: str) -> nn.Module:
    """The harness' convolutional net for digits, written again."""
    norms = {"none": lambda c: nn.Identity(), "batch": nn.BatchNorm2d, "group": lambda c: nn.GroupNorm(4, c)}
    layers = [nn.Conv2d(1, 8, 3, padding=1, bias=norm == "none"), norms[norm](8), nn.ReLU()]
    layers += [nn.Conv2d(8, 16, 3, padding=1, stride=2, bias=norm == "none"), norms[norm](16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


def train(config: Config, images: Tensor, labels: Tensor, num: int, name: str) -> tuple[list[Tensor], float]:
    """Train with `num` micro-batches per step: the weights and the loss at the end."""
    torch.manual_seed(0)
    model = make_model(config.norm).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    half = config.precision == "float16"
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4096.0, enabled=half)
    order, total = np.random.default_rng(0), 0.0
    for step in range(config.steps):
        total = 0.0
        for part in np.split(order.choice(len(images), 64, replace=False), num):
            with torch.autocast(DEVICE, dtype=torch.float16, enabled=half):
                loss = F.cross_entropy(model(images[part]).float(), labels[part]) / num
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        wandb.log({f"loss/{name}": total, f"gradient_norm/{name}": norm.item(), "step": step})
    return [p.detach() for p in model.parameters()], total


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config: Config) -> None:
    """Train the cell as a full batch and accumulated, and log how far apart they end."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)[:1500].to(DEVICE)
    labels = torch.tensor(digits.target)[:1500].to(DEVICE)
    with wandb.init(project="by-hand", mode="offline", dir=config.folder, config=dict(config)) as run:
        full, full_loss = train(config, images, labels, 1, "full")
        accumulated, loss = train(config, images, labels, config.accumulation_steps, "accumulated")
        distance = sum((a - b).square().sum() for a, b in zip(accumulated, full, strict=True)).sqrt()
        run.summary.update({"parameter_distance": distance.item(), "loss_gap": loss - full_loss})


if __name__ == "__main__":
    ConfigStore.instance().store(name="config", node=Config)
    main()
