"""MosaicML Composer's `Trainer`: one batch, split into micro-batches of `device_train_microbatch_size`, with a remainder."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch.nn import functional

from scoreboard import data, torchvision_operators  # noqa: F401

# isort: split
from composer import ComposerModel, DataSpec, Trainer
from composer.algorithms import GradientClipping
from composer.optim import DecoupledAdamW, LinearScheduler

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")


class Composed(ComposerModel):  # type: ignore[misc]
    """A model and its loss as Composer wants them; the loss is the mean over the micro-batch."""

    def __init__(self, module: torch.nn.Module, *, tokens: bool) -> None:
        super().__init__()
        self.module, self.tokens = module, tokens

    def forward(self, batch: Any) -> Any:
        return self.module(batch[0])

    def loss(self, outputs: Any, batch: Any, *_: Any, **__: Any) -> Any:
        if self.tokens:
            return data.token_loss(outputs, batch[0], "mean")
        return functional.cross_entropy(outputs, batch[1])


def _train(batch_size: int, accumulation_steps: int, *, tokens: bool = False, adamw: bool = False, **settings: Any) -> None:
    inputs, labels = data.images()
    rows = (data.sentences(), labels) if tokens else (inputs, labels)
    model = Composed(data.language_model() if tokens else data.model(), tokens=tokens)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=batch_size * accumulation_steps)
    optimizer = (
        DecoupledAdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
        if adamw
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    trainer = Trainer(
        model=model,
        train_dataloader=DataSpec(loader, get_num_tokens_in_batch=lambda batch: data.num_targets(batch[0])),
        optimizers=optimizer,
        schedulers=LinearScheduler(),
        max_duration=f"{data.EPOCHS}ep",
        device_train_microbatch_size=batch_size,
        device="cpu",
        seed=0,
        progress_bar=False,
        run_name="audited",
        **settings,
    )
    trainer.fit()
    trainer.close()


def samples(batch_size: int, accumulation_steps: int) -> None:
    """Mean loss over rows, SGD with momentum, a schedule, a remainder."""
    _train(batch_size, accumulation_steps)


def samples_adamw_clipped(batch_size: int, accumulation_steps: int) -> None:
    """`DecoupledAdamW`, gradient norm clipped at 0.3, a remainder."""
    clipping = GradientClipping(clipping_type="norm", clipping_threshold=0.3)
    _train(batch_size, accumulation_steps, adamw=True, algorithms=[clipping])


def tokens_by_samples(batch_size: int, accumulation_steps: int) -> None:
    """Mean loss over unequal lengths, micro-batches weighed by rows (the default), a remainder."""
    _train(batch_size, accumulation_steps, tokens=True)


def tokens_by_tokens(batch_size: int, accumulation_steps: int) -> None:
    """Mean loss over unequal lengths with `accumulate_train_batch_on_tokens=True`, a remainder."""
    _train(batch_size, accumulation_steps, tokens=True, accumulate_train_batch_on_tokens=True)
