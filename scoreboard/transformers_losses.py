"""transformers `Trainer` with a loss that is not the model's: a user's own `compute_loss`, and label smoothing.

GPT-2 and Llama on tiny random sizes, SGD, no clipping, 32 rows, that is full windows only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scoreboard import text
from scoreboard.transformers_trainer import Ordered, _gpt2, _llama, _train


def _shifted(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits [n, vocabulary] and the next tokens [n] of the positions that have one."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    labels = inputs["labels"][:, 1:]
    return logits[labels != -100], labels[labels != -100]


class Focal(Ordered):
    """Overrides `compute_loss` as many users do: the mean over the micro-batch, whatever number of items it is handed."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        logits, labels = _shifted(model, inputs)
        losses = functional.cross_entropy(logits, labels, reduction="none")
        loss = (1 - torch.exp(-losses)).square() * losses
        return loss.mean()


class FocalDeclared(Focal):
    """The attribute that transformers 5.19 added says that the loss is not divided by the window's items yet."""

    loss_is_scaled_for_ga = False


class FocalCounted(Ordered):
    """The sum over the micro-batch, divided by the items of the window."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        logits, labels = _shifted(model, inputs)
        losses = functional.cross_entropy(logits, labels, reduction="none")
        return ((1 - torch.exp(-losses)).square() * losses).sum() / num_items_in_batch


class Weighted(Ordered):
    """Cross-entropy with a weight for each class, whose mean divides by the weights of the micro-batch's labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        logits, labels = _shifted(model, inputs)
        return functional.cross_entropy(logits, labels, weight=torch.linspace(0.5, 2.0, text.VOCABULARY))


class WeightedDeclared(Weighted):
    loss_is_scaled_for_ga = False


def focal_equal_lengths(batch_size: int, accumulation_steps: int) -> list[float]:
    """A user's `compute_loss` returns the mean of a focal loss; equal lengths."""
    return _train(_gpt2(), text.causal(32, equal=True), batch_size, accumulation_steps, trainer=Focal)


def focal_equal_lengths_declared(batch_size: int, accumulation_steps: int) -> list[float]:
    """A user's `compute_loss`: mean of a focal loss with `loss_is_scaled_for_ga = False`; equal lengths."""
    return _train(_gpt2(), text.causal(32, equal=True), batch_size, accumulation_steps, trainer=FocalDeclared)


def focal(batch_size: int, accumulation_steps: int) -> list[float]:
    """A user's `compute_loss` returns the mean of a focal loss; unequal lengths."""
    return _train(_gpt2(), text.causal(32), batch_size, accumulation_steps, trainer=Focal)


def focal_declared(batch_size: int, accumulation_steps: int) -> list[float]:
    """A user's `compute_loss`: mean of a focal loss with `loss_is_scaled_for_ga = False`; unequal lengths."""
    return _train(_gpt2(), text.causal(32), batch_size, accumulation_steps, trainer=FocalDeclared)


def focal_counted(batch_size: int, accumulation_steps: int) -> list[float]:
    """A user's `compute_loss` divides its sum by `num_items_in_batch`; unequal lengths."""
    return _train(_gpt2(), text.causal(32), batch_size, accumulation_steps, trainer=FocalCounted)


def weighted_classes(batch_size: int, accumulation_steps: int) -> list[float]:
    """A user's `compute_loss` returns `cross_entropy(..., weight=...)`; equal lengths, unequal weights."""
    return _train(_llama(), text.causal(32, equal=True), batch_size, accumulation_steps, trainer=Weighted)


def weighted_classes_declared(batch_size: int, accumulation_steps: int) -> list[float]:
    """A user's `compute_loss`: `cross_entropy(..., weight=...)` with `loss_is_scaled_for_ga = False`; unequal weights."""
    return _train(_llama(), text.causal(32, equal=True), batch_size, accumulation_steps, trainer=WeightedDeclared)


def smoothed_equal_lengths(batch_size: int, accumulation_steps: int) -> list[float]:
    """`label_smoothing_factor=0.1`, equal lengths."""
    return _train(_llama(), text.causal(32, equal=True), batch_size, accumulation_steps, label_smoothing_factor=0.1)


def smoothed(batch_size: int, accumulation_steps: int) -> list[float]:
    """`label_smoothing_factor=0.1`, unequal lengths."""
    return _train(_llama(), text.causal(32), batch_size, accumulation_steps, label_smoothing_factor=0.1)
