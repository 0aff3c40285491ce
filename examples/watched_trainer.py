"""A `Trainer` of transformers under watch: `python examples/watched_trainer.py [mean]`, with transformers and accelerate.

A small Llama learns sequences of unequal lengths in windows of 4 micro-batches. With `mean`, its loss is the mean over each
micro-batch's own tokens, as a `compute_loss` that was written by hand often is, and the watch names what is wrong with it.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from accumulation_harness.watch import Report
from accumulation_harness.watch.callbacks.hf import WatchCallback

TOKENS, LONGEST = 32, 12


class Mean(Trainer):
    """Averages every micro-batch over its own tokens."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        """Return the mean, which the trainer takes for a share of the window's."""
        labels = inputs["labels"][:, 1:]
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sentences(num: int = 64) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens, of which a part is labelled."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(num):
        tokens = torch.randint(1, TOKENS, (LONGEST,), generator=draw)
        length = int(torch.randint(3, LONGEST + 1, (1,), generator=draw))
        rows.append({"input_ids": tokens, "labels": tokens.where(torch.arange(LONGEST) < length, -100)})
    return rows


def train(trainer: type[Trainer], callbacks: list[Any], folder: str) -> nn.Module:
    """Train for 6 windows of 4 micro-batches of 2 rows."""
    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    settings = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=6, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_steps=3,
    )  # fmt: skip
    trainer(model, settings, train_dataset=sentences(), callbacks=callbacks).train()
    return model


def watched(kind: str) -> tuple[Report, nn.Module]:
    """The report of a run, and its model; the replay takes the trainer's own arguments, and so its own divisor."""
    callback = WatchCallback(loss=lambda model, batch: model(**batch).loss, tell=None)
    with tempfile.TemporaryDirectory() as folder:
        model = train(Mean if kind == "mean" else Trainer, [callback], folder)
    return callback.report(), model


if __name__ == "__main__":
    print(watched(*sys.argv[1:2] or ["right"])[0])
