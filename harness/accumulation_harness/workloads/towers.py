"""Two encoders of text, one for queries and one for passages, from hashed byte trigrams."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from accumulation_harness.workloads.contrastive import Representations

NUM_TRIGRAMS = 4096  # buckets; 0 is padding
EMBEDDING = 64
START_SCALE, START_SCALE_SIGMOID, START_BIAS = 1 / 0.07, 10.0, -10.0  # CLIP's; SigLIP's


def trigrams(text: str, length: int) -> NDArray[np.int64]:
    """[length] bucket (1 to 4095) of the three bytes from each position on, of the lower-cased UTF-8; 0 beyond the end.

    Args:
        text: Any text.
        length: Number of buckets.

    Returns:
        [length] int64.
    """
    found = np.zeros(length, dtype=np.int64)
    raw = np.frombuffer(f" {text.lower()} ".encode()[: length + 2], dtype=np.uint8).astype(np.int64)
    if len(raw) >= 3:
        mixed = (raw[:-2] * 65536 + raw[1:-1] * 256 + raw[2:]) * 2654435761 % 2**32
        found[: len(mixed)] = 1 + (mixed >> 12) % (NUM_TRIGRAMS - 1)
    return found


class Tower(nn.Module):
    """[n, T] trigrams -> [n, E] unit vectors: embedding, a layer at every position, their mean, a linear map."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TRIGRAMS, width)
        self.hidden = nn.Linear(width, 2 * width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(2 * width, EMBEDDING)

    def forward(self, trigrams: Tensor) -> Tensor:
        """[n, T] -> [n, E]; padding takes no part in the mean."""
        present = (trigrams > 0).unsqueeze(2)
        hidden = self.dropout(F.gelu(self.hidden(self.embedding(trigrams))))
        mean = (hidden * present).sum(1) / present.sum(1).clamp(min=1)
        return F.normalize(self.out(mean), dim=1)


class TwoTowers(nn.Module):
    """[n, 2, T] trigrams of query and passage -> `Representations`.

    Both towers start from the same weights, as those of a dense retriever start from one pretrained model, and part in training.
    """

    def __init__(self, *, width: int, dropout: float, query_length: int, has_bias: bool) -> None:
        super().__init__()
        self.query_length = query_length
        self.query = Tower(width, dropout)
        self.passage = copy.deepcopy(self.query)
        self.log_scale = nn.Parameter(torch.tensor(math.log(START_SCALE_SIGMOID if has_bias else START_SCALE)))
        self.bias = nn.Parameter(torch.tensor(START_BIAS)) if has_bias else None

    def forward(self, texts: Tensor) -> Representations:
        """[n, 2, T] -> queries [n, E], passages [n, E]."""
        queries = self.query(texts[:, 0, : self.query_length])
        return Representations(queries, self.passage(texts[:, 1]), self.log_scale, self.bias)
