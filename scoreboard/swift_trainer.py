"""ms-swift's `Seq2SeqTrainer` on a tiny Llama of its own making, with and without label smoothing."""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import torch
import transformers
from swift.model import get_model_processor
from swift.template import get_template
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from scoreboard import pairs, plain_run, text
from scoreboard.transformers_trainer import _llama

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


class Ordered(Seq2SeqTrainer):  # type: ignore[misc]
    """Samples in the order of the data set, in every epoch."""

    def get_train_dataloader(self, *_: Any, **__: Any) -> Any:
        rows: Any = self.train_dataset
        return torch.utils.data.DataLoader(rows, self.args.per_device_train_batch_size, collate_fn=self.data_collator)


def _train(batch_size: int, accumulation_steps: int, *, equal: bool = False, counted: bool = True, **settings: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _llama().save_pretrained(folder)
        pairs.tokenizer().save_pretrained(folder)
        kept = {"torch_dtype": torch.float32, "device_map": "cpu", "attn_impl": "eager"}
        model, processor = get_model_processor(folder, model_type="llama", **kept)
        arguments = Seq2SeqTrainingArguments(
            **plain_run.settings(folder, batch_size, accumulation_steps, remove_unused_columns=False, **settings),
            weight_decay=0.0,
            gradient_checkpointing=False,
            check_model=False,
        )
        template = get_template(processor, template_type="dummy")
        template.set_mode("train")
        rows = []
        for row in text.causal(32, equal=equal):  # the first token is a prompt: it is no label
            rows.append({"input_ids": row["input_ids"].tolist(), "labels": [-100, *row["labels"][1:].tolist()]})
        started = Ordered(model=model, args=arguments, template=template, train_dataset=rows)
        started.remove_callback(transformers.PrinterCallback)
        started.model_accepts_loss_kwargs &= counted
        started.train()


def causal(batch_size: int, accumulation_steps: int) -> None:
    """Llama, unequal lengths, divisible."""
    _train(batch_size, accumulation_steps)


def smoothed_equal_lengths(batch_size: int, accumulation_steps: int) -> None:
    """`label_smoothing_factor=0.1`, equal lengths, divisible."""
    _train(batch_size, accumulation_steps, equal=True, label_smoothing_factor=0.1)


def smoothed_equal_lengths_declared(batch_size: int, accumulation_steps: int) -> None:
    """`label_smoothing_factor=0.1`, `trainer.model_accepts_loss_kwargs = False`, equal lengths, divisible."""
    _train(batch_size, accumulation_steps, equal=True, counted=False, label_smoothing_factor=0.1)


def smoothed(batch_size: int, accumulation_steps: int) -> None:
    """`label_smoothing_factor=0.1`, unequal lengths, divisible."""
    _train(batch_size, accumulation_steps, label_smoothing_factor=0.1)


def dft(batch_size: int, accumulation_steps: int) -> None:
    """`enable_dft_loss`, unequal lengths, divisible."""
    _train(batch_size, accumulation_steps, enable_dft_loss=True)
