"""trl's trainers on pairs of a chosen and a rejected answer, tiny random models, a tokenizer made here."""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import torch
import transformers
from trl import DPOConfig, DPOTrainer, ORPOConfig, ORPOTrainer, RewardConfig, RewardTrainer

from scoreboard import pairs, plain_run, text
from scoreboard.transformers_trainer import _gpt2, _llama

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")


def _train(trainer: Any, config: Any, model: Any, rows: Any, batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    class Ordered(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as folder:
        given = plain_run.settings(folder, batch_size, accumulation_steps, **settings)
        made = config(**given, max_length=16, bf16=False, gradient_checkpointing=False)
        started = Ordered(model=model, args=made, train_dataset=rows, processing_class=pairs.tokenizer())
        started.remove_callback(transformers.PrinterCallback)
        started.train()


def dpo(batch_size: int, accumulation_steps: int) -> None:
    """`DPOTrainer`, unequal lengths, a remainder."""
    _train(DPOTrainer, DPOConfig, _gpt2(), pairs.preferences(40), batch_size, accumulation_steps)


def dpo_llama(batch_size: int, accumulation_steps: int) -> None:
    """`DPOTrainer` on a model whose forward takes a number of items (Llama); answers of four words, divisible."""
    _train(DPOTrainer, DPOConfig, _llama(), pairs.preferences(32, words=4), batch_size, accumulation_steps)


def reward(batch_size: int, accumulation_steps: int) -> None:
    """`RewardTrainer`, which leaves out rows that are too long, so that the last micro-batch is short."""
    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": text.VOCABULARY, "pad_token_id": 0}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes, **quiet, num_labels=1))
    _train(RewardTrainer, RewardConfig, model, pairs.preferences(40), batch_size, accumulation_steps)


def orpo(batch_size: int, accumulation_steps: int) -> None:
    """`ORPOTrainer`, unequal lengths, divisible."""
    _train(ORPOTrainer, ORPOConfig, _gpt2(), pairs.preferences(32), batch_size, accumulation_steps, max_prompt_length=4)
