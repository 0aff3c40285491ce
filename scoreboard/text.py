"""Tiny random language data for framework trainers: unequal lengths, fixed order, no tokenizer, nothing downloaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

VOCABULARY, LONGEST, PAD = 32, 12, 0


def rows(count: int = 40, *, equal: bool = False) -> list[Tensor]:
    """Token rows from 1 on; of 4 to `LONGEST` tokens, or all of `LONGEST`."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.full((count,), LONGEST) if equal else torch.randint(4, LONGEST + 1, (count,), generator=generator)
    return [torch.randint(1, VOCABULARY, (int(length),), generator=generator) for length in lengths]


def collate(examples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Padded to the longest row of the micro-batch; labels are -100 there."""
    batch: dict[str, list[Tensor]] = {key: [example[key] for example in examples] for key in examples[0]}
    pads = {"input_ids": PAD, "labels": -100, "attention_mask": 0}
    padded = {}
    for key, values in batch.items():
        if values[0].ndim == 0:
            padded[key] = torch.stack(values)
        else:
            padded[key] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=pads.get(key, 0))
    return padded


def causal(count: int = 40, *, equal: bool = False) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()} for row in rows(count, equal=equal)]


def masked(count: int = 40) -> list[dict[str, Tensor]]:
    """Every third token is predicted (unequal numbers of targets)."""
    made = []
    for index, example in enumerate(causal(count)):
        chosen = (torch.arange(len(example["labels"])) + index) % 3 == 0
        made.append({**example, "labels": torch.where(chosen, example["labels"], -100)})
    return made


def tagged(count: int = 40) -> list[dict[str, Tensor]]:
    """Three classes per token."""
    return [{**example, "labels": example["labels"] % 3} for example in causal(count)]


def classified(count: int = 40) -> list[dict[str, Tensor]]:
    """Two classes per row: weights are equal, so that only scale faults can show."""
    return [{**example, "labels": example["input_ids"].sum() % 2} for example in causal(count)]
