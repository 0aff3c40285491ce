"""Small seeded data and models for audits: rows in a fixed order, windows with a remainder, sentences of unequal lengths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, FEATURES, CLASSES, EPOCHS = 40, 12, 4, 2  # windows of 16 leave a remainder of 8 in each epoch
VOCABULARY, LONGEST = 24, 12


def images(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return inputs.to(dtype), labels


def model(dtype: torch.dtype = torch.float32, *extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), *extra, nn.Tanh(), nn.Linear(16, CLASSES)).to(torch.float64).to(dtype)


def sentences() -> Tensor:
    """[SAMPLES, LONGEST] tokens from 1, padded with 0 to unequal lengths."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, LONGEST), generator=generator)
    lengths = torch.randint(2, LONGEST + 1, (SAMPLES, 1), generator=generator)
    return tokens * (torch.arange(LONGEST) < lengths)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.norm(torch.relu(self.hidden(self.embedding(tokens)))))
        return hidden


def language_model(dtype: torch.dtype = torch.float32) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel().to(torch.float64).to(dtype)


def token_loss(logits: Tensor, tokens: Tensor, reduction: str = "sum") -> Tensor:
    """Next-token loss over what is not padding."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0, reduction=reduction)


def num_targets(tokens: Tensor) -> int:
    return int((tokens[:, 1:] != 0).sum())


def windows(size: int, epochs: int = EPOCHS, *, keep: bool = True, order_seed: int = 0) -> Iterator[Tensor]:
    """Row numbers of each window; the last of an epoch is short (or left out)."""
    for epoch in range(epochs):
        order = torch.arange(SAMPLES).roll(7 * epoch)
        for window in order.split(size):
            if len(window) == size or keep:
                if order_seed:
                    window = window[torch.randperm(len(window), generator=torch.Generator().manual_seed(order_seed))]
                yield window
