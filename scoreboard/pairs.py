"""A tokenizer made here, and rows of prompts and answers for trl's trainers, so that nothing is downloaded."""

from __future__ import annotations

from typing import Any

import datasets
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from scoreboard import text

datasets.disable_progress_bars()


def tokenizer() -> Any:
    vocabulary = {"<pad>": 0, **{f"t{i}": i for i in range(1, text.VOCABULARY)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="t1"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "t1", "eos_token": "t1", "unk_token": "t1"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def preferences(count: int, words: int | None = None) -> Any:
    """A prompt of two tokens, a chosen and a rejected answer, of unequal lengths or of so many words each."""
    rows = [" ".join(f"t{int(token)}" for token in row) for row in text.rows(2 * count, equal=words is not None)]
    made = []
    for chosen, rejected in zip(rows[:count], rows[count:], strict=True):
        prompt, answer = chosen.split(" ", 2)[:2], chosen.split(" ", 2)[2]
        answers = [" ".join(row.split()[2 : 2 + words]) for row in (chosen, rejected)] if words else [answer, rejected[:11]]
        made.append({"prompt": " ".join(prompt), "chosen": f" {answers[0]}", "rejected": f" {answers[1]}"})
    return datasets.Dataset.from_list(made)


def judged(count: int) -> Any:
    """One answer per prompt and whether it is wanted: two in three are."""
    rows = preferences(count)
    made = [{"prompt": row["prompt"], "completion": row["chosen"], "label": place % 3 != 1} for place, row in enumerate(rows)]
    return datasets.Dataset.from_list(made)
