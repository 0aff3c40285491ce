"""trl `SFTTrainer` on a tiny random model with token ids given, so that nothing is downloaded."""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import datasets
import torch
import transformers
from trl import SFTConfig, SFTTrainer

from scoreboard import plain_run, text
from scoreboard.transformers_trainer import _gpt2

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
datasets.disable_progress_bars()


class Ordered(SFTTrainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    vocabulary = {"<pad>": 0, **{f"t{i}": i for i in range(1, text.VOCABULARY)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="t1"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="t1", unk_token="t1")


def sft(batch_size: int, accumulation_steps: int, **settings: Any) -> list[float]:
    """`SFTTrainer` (GPT-2), unequal lengths, a remainder."""
    rows = [{"input_ids": row.tolist()} for row in text.rows()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = plain_run.settings(folder, batch_size, accumulation_steps, **settings)
        config = SFTConfig(**arguments, bf16=False, gradient_checkpointing=False, logging_steps=1)
        trainer = Ordered(
            model=_gpt2(), args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=_tokenizer()
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def sft_adamw(batch_size: int, accumulation_steps: int) -> list[float]:
    """`SFTTrainer` (GPT-2), AdamW, clipping at 1, unequal lengths, a remainder."""
    return sft(batch_size, accumulation_steps, optim="adamw_torch", learning_rate=1e-3, max_grad_norm=1.0)
