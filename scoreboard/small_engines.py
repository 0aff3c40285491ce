"""Accumulation as ignite, poutyne, pytorch-accelerated, torchtnt and skorch (the recipe of its tests) have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scoreboard import data


def _rows(count: int) -> TensorDataset:
    inputs, labels = data.images()
    return TensorDataset(inputs[:count], labels[:count])


def _sentences(batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """32 sentences of unequal lengths, each its own target."""
    return [(part, part) for part in data.sentences()[:32].split(batch_size)]


def _mean(logits: Tensor, tokens: Tensor) -> Tensor:
    return data.token_loss(logits, tokens, "mean")


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _ignite(model: nn.Module, loss: Any, batches: Any, accumulation_steps: int) -> None:
    from ignite.engine import create_supervised_trainer

    trainer = create_supervised_trainer(model, _sgd(model), loss, gradient_accumulation_steps=accumulation_steps)
    trainer.run(batches, max_epochs=data.EPOCHS)


def ignite_divisible(batch_size: int, accumulation_steps: int) -> None:
    """`create_supervised_trainer`, divisible."""
    _ignite(data.model(), nn.functional.cross_entropy, DataLoader(_rows(32), batch_size), accumulation_steps)


def ignite_remainder(batch_size: int, accumulation_steps: int) -> None:
    """`create_supervised_trainer`, a remainder."""
    _ignite(data.model(), nn.functional.cross_entropy, DataLoader(_rows(40), batch_size), accumulation_steps)


def ignite_unequal(batch_size: int, accumulation_steps: int) -> None:
    """`create_supervised_trainer`, mean loss over unequal lengths, divisible."""
    _ignite(data.language_model(), _mean, _sentences(batch_size), accumulation_steps)


def _poutyne(model: nn.Module, loss: Any, batches: Any, accumulation_steps: int) -> None:
    from poutyne import Model

    trainer = Model(model, _sgd(model), loss)
    trainer.fit_generator(batches, None, epochs=data.EPOCHS, batches_per_step=accumulation_steps, verbose=False)


def poutyne_remainder(batch_size: int, accumulation_steps: int) -> None:
    """`batches_per_step=N`, a remainder of 7 rows, whose last micro-batch is short."""
    _poutyne(data.model(), nn.CrossEntropyLoss(), DataLoader(_rows(39), batch_size), accumulation_steps)


def poutyne_unequal(batch_size: int, accumulation_steps: int) -> None:
    """`batches_per_step=N`, mean loss over unequal lengths, divisible."""
    _poutyne(data.language_model(), _mean, _sentences(batch_size), accumulation_steps)


def _accelerated(rows: int, batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    from accelerate.state import AcceleratorState, GradientState
    from pytorch_accelerated import Trainer

    class InOrder(Trainer):  # type: ignore[misc]
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            return DataLoader(self.train_dataset, batch_size)

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model = data.model()
    trainer = InOrder(model, loss_func=nn.CrossEntropyLoss(), optimizer=_sgd(model), callbacks=())
    settings |= {"num_epochs": data.EPOCHS, "per_device_batch_size": batch_size}
    trainer.train(train_dataset=_rows(rows), gradient_accumulation_steps=accumulation_steps, **settings)


def accelerated_divisible(batch_size: int, accumulation_steps: int) -> None:
    """`Trainer`, divisible."""
    _accelerated(32, batch_size, accumulation_steps)


def accelerated_short_window(batch_size: int, accumulation_steps: int) -> None:
    """`Trainer`, a remainder."""
    _accelerated(40, batch_size, accumulation_steps)


def accelerated_clipped(batch_size: int, accumulation_steps: int) -> None:
    """`Trainer`, `gradient_clip_value=0.02`, divisible."""
    _accelerated(32, batch_size, accumulation_steps, gradient_clip_value=0.02)


def _torchtnt(rows: int, batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.train import train

    class Unit(AutoUnit[Any]):  # type: ignore[misc]
        def compute_loss(self, state: Any, batch: Any) -> tuple[Tensor, Tensor]:
            outputs = self.module(batch[0])
            return nn.functional.cross_entropy(outputs, batch[1]), outputs

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
            optimizer = _sgd(module)
            return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    device = torch.device("cpu")
    unit = Unit(module=data.model(), device=device, gradient_accumulation_steps=accumulation_steps, **settings)
    train(unit, DataLoader(_rows(rows), batch_size), max_epochs=data.EPOCHS)


def torchtnt_clipped_scheduled(batch_size: int, accumulation_steps: int) -> None:
    """`AutoUnit`, clipping at 0.3, a schedule per step, divisible."""
    _torchtnt(32, batch_size, accumulation_steps, clip_grad_norm=0.3, step_lr_interval="step")


def torchtnt_short_window(batch_size: int, accumulation_steps: int) -> None:
    """`AutoUnit`, a remainder."""
    _torchtnt(40, batch_size, accumulation_steps)


def _skorch(rows: int, batch_size: int, accumulation_steps: int) -> None:
    from skorch import NeuralNetClassifier

    class Accumulating(NeuralNetClassifier):  # type: ignore[misc]
        def get_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().get_loss(*args, **kwargs) / accumulation_steps

        def train_step(self, batch: Any, **fit_params: Any) -> Any:
            step = self.train_step_single(batch, **fit_params)
            if len(self.history[-1, "batches"]) % accumulation_steps == 0:
                self.optimizer_.step()
                self.optimizer_.zero_grad()
            return step

    net = Accumulating(
        data.model,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=0.1,
        max_epochs=data.EPOCHS,
        batch_size=batch_size,
        train_split=None,
        verbose=0,
    )
    inputs, labels = _rows(rows).tensors
    net.fit(inputs, labels)


def skorch_divisible(batch_size: int, accumulation_steps: int) -> None:
    """The recipe of skorch's tests, divisible."""
    _skorch(32, batch_size, accumulation_steps)


def skorch_remainder(batch_size: int, accumulation_steps: int) -> None:
    """The recipe of skorch's tests, a remainder."""
    _skorch(40, batch_size, accumulation_steps)
