"""A causal language model of transformers on lines of unequal lengths, its loss counted in tokens.

    pip install transformers
    accumulation-harness run workload=custom workload.target=examples/language_model.py:Lines optimizer=adamw

Expect: `equivalent`. A trainer that averages the micro-batches' mean losses would be `different (mean_of_means)`:
add `faults=[mean_of_means]` to see it.
"""

from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel


class Lines:
    """Lines of Python's own help texts, byte by byte; byte 0 is padding."""

    def __init__(self, width=32, layers=2, samples=1000):
        lines = dict.fromkeys(line.strip()[:48] for text in topics.values() for line in text.splitlines())
        rows = [torch.tensor(list(line.encode()[:48])) for line in lines if len(line) > 3]
        self.rows = rows[: samples + 100]
        self.size = {"n_embd": width, "n_layer": layers, "n_head": 2, "n_positions": 64, "vocab_size": 256}

    def model(self, norm):
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        special = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
        return GPT2LMHeadModel(GPT2Config(**self.size, **no_dropout, **special))

    def train(self):
        return self.rows[:-100]

    def held_out(self):
        return self.rows[-100:]

    def collate(self, rows):
        ids = pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    def losses(self, outputs, batch):  # summed over a row's tokens
        scores = outputs.logits[:, :-1].transpose(1, 2)
        return F.cross_entropy(scores, batch["labels"][:, 1:], ignore_index=-100, reduction="none").sum(1)

    def terms(self, batch):  # how many tokens that were
        return (batch["labels"][:, 1:] != -100).sum(1)

    def correct(self, outputs, batch):
        return (outputs.logits[:, :-1].argmax(2) == batch["labels"][:, 1:]).sum(1)
