"""sentence-transformers' `MegaBatchMarginLoss`, which takes a large batch in parts of `mini_batch_size`."""

from __future__ import annotations

import tempfile

import torch
import transformers
from sentence_transformers import SentenceTransformer, losses, models

from scoreboard import pairs

transformers.logging.set_verbosity_error()


def _model() -> SentenceTransformer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 32}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}
    with tempfile.TemporaryDirectory() as folder:
        transformers.BertModel(transformers.BertConfig(**sizes, **quiet)).save_pretrained(folder)
        pairs.tokenizer().save_pretrained(folder)
        return SentenceTransformer(modules=[models.Transformer(folder), models.Pooling(16)], device="cpu")


def mini_batches(batch_size: int, accumulation_steps: int) -> None:
    """`MegaBatchMarginLoss` of 32 pairs, `mini_batch_size` 1/N of the batch; at N=1 the loss without mini-batches."""
    model = _model()
    parts = {"use_mini_batched_version": accumulation_steps > 1, "mini_batch_size": batch_size}
    loss = losses.MegaBatchMarginLoss(model, positive_margin=1.0, negative_margin=0.0, **parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = pairs.preferences(32, words=6)
    whole = batch_size * accumulation_steps
    for start in range(0, 32, whole):
        chosen = [rows[place] for place in range(start, start + whole)]
        features = [model.tokenize([row[key] for row in chosen]) for key in ("prompt", "chosen")]
        loss([{k: v for k, v in one.items() if isinstance(v, torch.Tensor)} for one in features], torch.tensor([])).backward()
        optimizer.step()
        optimizer.zero_grad()
