"""The sweep that one writes by hand: Hydra's basic launcher, one job per cell, the full batch and then the accumulated run.

`accumulation-harness bench.sweep_by_hand -m norm=none,batch precision=float32,float16 accumulation_steps=2,4,8,16` trains what
`accumulation-harness run` trains for the same settings, and logs losses and gradient norms to W&B, offline.
"""

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
    optimizer: str = "sgd"
    precision: str = "float32"
    effective_batch: int = 64
    accumulation_steps: int = 4
    steps: int = 100
    lr: float = 0.1
    seed: int = 0
    threads: int = 0  # 0: PyTorch's own choice
    folder: str = "."


def make_norm(name: str, channels: int) -> nn.Module:
    """A normalisation of feature maps with `channels` channels."""
    norms = {"none": nn.Identity(), "batch": nn.BatchNorm2d(channels), "group": nn.GroupNorm(4, channels)}
    return norms[name]


def make_model(config: Config) -> nn.Module:
    """The harness' convolutional net for digits, written again."""
    bias = config.norm == "none"
    layers = [nn.Conv2d(1, 8, 3, padding=1, bias=bias), make_norm(config.norm, 8), nn.ReLU()]
    layers += [nn.Conv2d(8, 16, 3, padding=1, stride=2, bias=bias), make_norm(config.norm, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


def train(config: Config, images: Tensor, labels: Tensor, num: int, name: str) -> tuple[list[Tensor], list[float]]:
    """Train with `num` micro-batches per step: the weights at the end, and the loss of every step."""
    torch.manual_seed(config.seed)
    model = make_model(config).to(DEVICE)
    makers = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = makers[config.optimizer](model.parameters(), lr=config.lr)
    half = config.precision == "float16"
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4096.0, enabled=half)
    order, losses = np.random.default_rng(config.seed), []
    gradients: list[Tensor] = []
    for step in range(config.steps):
        ids = order.choice(len(images), config.effective_batch, replace=False)
        total = 0.0
        for part in np.split(ids, num):
            with torch.autocast(DEVICE, dtype=torch.float16, enabled=half):
                loss = F.cross_entropy(model(images[part]).float(), labels[part]) / num
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total)
        wandb.log({f"loss/{name}": total, f"gradient_norm/{name}": norm.item(), "step": step})
    return [p.detach() for p in model.parameters()], losses


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config: Config) -> None:
    """Train the cell as a full batch and accumulated, and log how far apart they end."""
    if config.threads:
        torch.set_num_threads(config.threads)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)[:1500].to(DEVICE)
    labels = torch.tensor(digits.target)[:1500].to(DEVICE)
    name = f"{config.norm}-{config.optimizer}-{config.precision}-{config.accumulation_steps}"
    with wandb.init(project="by-hand", name=name, mode="offline", dir=config.folder, config=dict(config)) as run:  # type: ignore[call-overload]
        full, full_losses = train(config, images, labels, 1, "full")
        accumulated, losses = train(config, images, labels, config.accumulation_steps, "accumulated")
        distance = sum((a - b).square().sum() for a, b in zip(accumulated, full, strict=True)).sqrt()  # type: ignore[union-attr]
        run.summary.update({"parameter_distance": distance.item(), "loss_gap": losses[-1] - full_losses[-1]})


if __name__ == "__main__":
    ConfigStore.instance().store(name="config", node=Config)  # nobody who imports this wants it among the harness' own
    main()
