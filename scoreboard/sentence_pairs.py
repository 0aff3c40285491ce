"""sentence-transformers' trainer on pairs of sentences: in-batch negatives with accumulation, and its cached losses."""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import torch
import transformers
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from scoreboard import pairs, plain_run
from scoreboard.transformers_trainer import _bert

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
transformers.logging.disable_progress_bar()


class Ordered(SentenceTransformerTrainer):  # type: ignore[misc]
    """Pairs in the order of the data set, in every epoch."""

    def get_batch_sampler(self, dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> Any:
        return torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(dataset), batch_size, drop_last)


def _model() -> SentenceTransformer:
    """A tiny BERT without dropout, and the mean of its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        _bert("BertModel").save_pretrained(folder)
        pairs.tokenizer().save_pretrained(folder)
        body = Transformer(folder)
    model = SentenceTransformer(modules=[body, Pooling(16)], device="cpu")
    model.model_card_data.generate_widget_examples = False
    model.model_card_data.local_files_only = True
    return model


def _train(loss: Any, batch_size: int, accumulation_steps: int, rows: int, **settings: Any) -> None:
    model = _model()
    answers = pairs.preferences(rows).select_columns(["prompt", "chosen"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(**plain_run.settings(folder, batch_size, accumulation_steps))
        started = Ordered(model=model, args=arguments, train_dataset=answers, loss=loss(model, **settings))
        started.remove_callback(transformers.PrinterCallback)
        started.train()


def ranking(batch_size: int, accumulation_steps: int) -> None:
    """`MultipleNegativesRankingLoss`, accumulated: negatives of the micro-batch only; divisible."""
    _train(losses.MultipleNegativesRankingLoss, batch_size, accumulation_steps, 32)


def ranking_cached(batch_size: int, accumulation_steps: int) -> None:
    """`CachedMultipleNegativesRankingLoss` with `mini_batch_size` in place of accumulation; a remainder."""
    _cached(losses.MultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss, batch_size, accumulation_steps)


def symmetric_cached(batch_size: int, accumulation_steps: int) -> None:
    """`CachedMultipleNegativesSymmetricRankingLoss` with `mini_batch_size` in place of accumulation; a remainder."""
    plain, cached = losses.MultipleNegativesSymmetricRankingLoss, losses.CachedMultipleNegativesSymmetricRankingLoss
    _cached(plain, cached, batch_size, accumulation_steps)


def _cached(plain: Any, cached: Any, batch_size: int, accumulation_steps: int) -> None:
    """The whole window is one batch, which the cached loss takes in parts; N=1 is the loss without a cache."""
    if accumulation_steps == 1:
        _train(plain, batch_size, 1, 40)
    else:
        _train(cached, batch_size * accumulation_steps, 1, 40, mini_batch_size=batch_size)


def ranking_cached_and_accumulated(batch_size: int, accumulation_steps: int) -> None:
    """`CachedMultipleNegativesRankingLoss`, accumulated: negatives of the micro-batch only; divisible."""
    _train(losses.CachedMultipleNegativesRankingLoss, batch_size, accumulation_steps, 32, mini_batch_size=1)
