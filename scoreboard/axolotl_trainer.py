"""axolotl's `AxolotlTrainer`, which says of every model that it takes no number of items; tiny Llama, unequal lengths."""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import datasets
import transformers
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.core.training_args import AxolotlTrainingArguments

from scoreboard import pairs, plain_run, text
from scoreboard.transformers_trainer import _llama

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")


def _train(batch_size: int, accumulation_steps: int, rows: int = 32, *, equal: bool = False, counted: bool = False) -> None:
    made = [{key: value.tolist() for key, value in row.items()} for row in text.causal(rows, equal=equal)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = AxolotlTrainingArguments(
            **plain_run.settings(folder, batch_size, accumulation_steps, remove_unused_columns=False),
            curriculum_sampling=True,  # rows in their order
        )
        trainer: Any = AxolotlTrainer(
            model=_llama(),
            args=arguments,
            train_dataset=datasets.Dataset.from_list(made).with_format("torch"),
            data_collator=text.collate,
            processing_class=pairs.tokenizer(),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.model_accepts_loss_kwargs |= counted
        trainer.train()


def causal(batch_size: int, accumulation_steps: int) -> None:
    """Llama, unequal lengths, divisible."""
    _train(batch_size, accumulation_steps)


def causal_equal_lengths(batch_size: int, accumulation_steps: int) -> None:
    """Llama, equal lengths, a remainder."""
    _train(batch_size, accumulation_steps, 40, equal=True)


def causal_counted(batch_size: int, accumulation_steps: int) -> None:
    """Llama with `trainer.model_accepts_loss_kwargs = True`, unequal lengths, divisible."""
    _train(batch_size, accumulation_steps, counted=True)
