"""LLaMA-Factory's `CustomSeq2SeqTrainer`: its own loss functions, and a model that comes with a processor."""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

import torch

from scoreboard import text, torchvision_operators  # noqa: F401

try:
    import torchaudio  # noqa: F401
except OSError:  # built for CUDA, beside a torch for CPUs: nothing of it is used here
    sys.modules["torchaudio"] = module_from_spec(ModuleSpec("torchaudio", None))
# isort: split
import transformers
from llamafactory.hparams import FinetuningArguments, TrainingArguments
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

from scoreboard import pairs, plain_run
from scoreboard.transformers_trainer import _llama

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()


def _train(batch_size: int, accumulation_steps: int, *, equal: bool = False, processor: bool = False, **settings: Any) -> None:
    reference = _llama()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.5)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**plain_run.settings(folder, batch_size, accumulation_steps, remove_unused_columns=False))
        started = CustomSeq2SeqTrainer(
            finetuning_args=FinetuningArguments(disable_shuffling=True, **settings),
            processor=pairs.tokenizer() if processor else None,
            ref_model=reference if settings.get("use_asft_loss") else None,
            model=_llama(),
            args=arguments,
            train_dataset=text.causal(32, equal=equal),
            data_collator=text.collate,
            tokenizer=pairs.tokenizer(),
        )
        started.remove_callback(transformers.PrinterCallback)
        started.train()


def causal(batch_size: int, accumulation_steps: int) -> None:
    """Llama, unequal lengths, divisible."""
    _train(batch_size, accumulation_steps)


def causal_with_processor(batch_size: int, accumulation_steps: int) -> None:
    """Llama that comes with a processor, as every multimodal model does; unequal lengths, divisible."""
    _train(batch_size, accumulation_steps, processor=True)


def dft(batch_size: int, accumulation_steps: int) -> None:
    """`use_dft_loss`, unequal lengths, divisible."""
    _train(batch_size, accumulation_steps, use_dft_loss=True)


def asft(batch_size: int, accumulation_steps: int) -> None:
    """`use_asft_loss`, unequal lengths, divisible."""
    _train(batch_size, accumulation_steps, use_asft_loss=True)


def asft_equal_lengths(batch_size: int, accumulation_steps: int) -> None:
    """`use_asft_loss`, equal lengths, divisible."""
    _train(batch_size, accumulation_steps, equal=True, use_asft_loss=True)
