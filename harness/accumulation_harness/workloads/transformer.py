"""A small pre-norm transformer that predicts the next character."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from accumulation_harness.config import Norm
from accumulation_harness.workloads.image_models import dropping

HEAD_SIZE = 24  # one head at the default width: attention over short lines costs time by the head


def _make_feature_norm(norm: Norm, features: int) -> nn.Module:
    """LayerNorm or nothing; the other normalisations have no usual meaning over characters."""
    return nn.LayerNorm(features) if norm == Norm.layer else nn.Identity()


class CausalAttention(nn.Module):
    """Self-attention in which position t sees positions 1 to t: softmax(q k^T / sqrt(d)) v per head, d about 24.

    No biases on queries, keys and values: a key bias shifts all scores of a query alike, so its true gradient is zero.
    Written as plain products so that every precision, `vmap` and deterministic mode take the same path.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.num_heads = max(1, features // HEAD_SIZE)
        self.head_size = features // self.num_heads
        inner = self.num_heads * self.head_size
        self.project = nn.Linear(features, 3 * inner, bias=False)
        self.combine = nn.Linear(inner, features)

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, T, features] -> [n, T, features]."""
        n, length, _ = hidden.shape
        projected = self.project(hidden).view(n, length, 3, self.num_heads, self.head_size).permute(2, 0, 3, 1, 4)
        query, key, value = projected.unbind(0)  # [n, heads, T, d] each
        scores = (query / math.sqrt(self.head_size)) @ key.transpose(2, 3)
        future = torch.full((length, length), -math.inf, dtype=scores.dtype, device=scores.device).triu(1)
        weights = (scores + future).softmax(3)  # adding costs half of what masked_fill does
        combined: Tensor = self.combine((weights @ value).transpose(1, 2).reshape(n, length, -1))
        return combined


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the hidden layer of the mlp is twice as wide."""

    def __init__(self, features: int, *, norm: Norm) -> None:
        super().__init__()
        self.attention = nn.Sequential(_make_feature_norm(norm, features), CausalAttention(features))
        self.mlp = nn.Sequential(
            _make_feature_norm(norm, features), nn.Linear(features, 2 * features), nn.GELU(), nn.Linear(2 * features, features)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, T, features] -> [n, T, features]."""
        hidden = hidden + self.attention(hidden)
        out: Tensor = hidden + self.mlp(hidden)
        return out


class Transformer(nn.Module):
    """[n, T] character indices -> [n, T, V] scores of the next character, with 3 * width features.

    Padding at the end of a sequence cannot reach its earlier positions, because attention is causal.
    """

    def __init__(
        self, vocabulary_size: int, *, max_length: int, padding: int, width: int, depth: int, norm: Norm, dropout: float = 0.0
    ) -> None:
        super().__init__()
        features = 3 * width
        self.characters = nn.Embedding(vocabulary_size, features, padding_idx=padding)
        self.positions = nn.Parameter(torch.randn(max_length, features))
        self.blocks = nn.Sequential(*(TransformerBlock(features, norm=norm) for _ in range(depth)))
        self.predict = nn.Sequential(_make_feature_norm(norm, features), *dropping(dropout), nn.Linear(features, vocabulary_size))

    def forward(self, characters: Tensor) -> Tensor:
        """[n, T] indices of characters -> [n, T, V] scores."""
        hidden = self.characters(characters) + self.positions[: characters.shape[1]]
        scores: Tensor = self.predict(self.blocks(hidden))
        return scores
