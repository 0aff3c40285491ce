"""mmengine's `Runner` with `OptimWrapper(accumulative_counts=N)`: remainder, clipping, schedules, an average of the weights."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from torch import Tensor
from torch.nn import functional

from scoreboard import data

warnings.simplefilter("ignore")


class Classifier(BaseModel):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = data.model()

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(self.net(x), y)}


def _train(batch_size: int, accumulation_steps: int, rows: int = 32, *, clip: Any = None, **settings: Any) -> None:
    inputs, labels = data.images()
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        loader = {
            "dataset": torch.utils.data.TensorDataset(inputs[:rows], labels[:rows]),
            "batch_size": batch_size,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "collate_fn": {"type": "default_collate"},
            "num_workers": 0,
        }
        Runner(
            model,
            folder,
            train_dataloader=loader,
            optim_wrapper=OptimWrapper(optimizer, accumulative_counts=accumulation_steps, clip_grad=clip),
            train_cfg={"by_epoch": True, "max_epochs": data.EPOCHS},
            default_hooks={"checkpoint": None, "logger": None},
            log_level="ERROR",
            experiment_name=folder.replace("/", "_"),  # each name can be used once in a process
            randomness={"seed": 0},
            **settings,
        ).train()


def clipped_divisible(batch_size: int, accumulation_steps: int) -> None:
    """SGD with momentum, gradient norm clipped at 0.3, divisible."""
    _train(batch_size, accumulation_steps, clip={"max_norm": 0.3})


def remainder(batch_size: int, accumulation_steps: int) -> None:
    """SGD, a remainder."""
    _train(batch_size, accumulation_steps, 40)


def schedule_by_iteration(batch_size: int, accumulation_steps: int) -> None:
    """A linear schedule of 4 steps with `by_epoch=False`, divisible."""
    _train(batch_size, accumulation_steps, param_scheduler=_linear(by_epoch=False, end=4))


def schedule_by_epoch(batch_size: int, accumulation_steps: int) -> None:
    """A linear schedule of 2 epochs, divisible."""
    _train(batch_size, accumulation_steps, param_scheduler=_linear(by_epoch=True, end=data.EPOCHS))


def average(batch_size: int, accumulation_steps: int) -> None:
    """`EMAHook`, momentum 0.1, divisible."""
    _train(batch_size, accumulation_steps, custom_hooks=[{"type": "EMAHook", "momentum": 0.1}])


def _linear(**settings: Any) -> dict[str, Any]:
    return {"type": "LinearLR", "start_factor": 1.0, "end_factor": 0.1, "begin": 0, **settings}
