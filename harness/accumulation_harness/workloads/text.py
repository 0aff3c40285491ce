"""Next-character prediction on lines of text, whose lengths are naturally unequal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accumulation_harness.workloads import Batch, Workload, wide

PADDING = 0  # index in the vocabulary; no character has it
IGNORED = -100  # target at padded positions
MIN_CHARACTERS, MAX_CHARACTERS = 4, 32
MAX_TRAIN, MAX_HELD_OUT = 2000, 300
PERMUTATION_SEED = 20240601  # of the split; never a trial's seed: all trials train on the same samples


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A text and the lines of it that are trained on or held out."""

    text: str
    lines: tuple[str, ...]  # distinct, 4 to 32 characters, in a fixed random order

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All characters of the text, sorted; character i has index i + 1."""
        return tuple(sorted(set(self.text)))


def read_corpus() -> Corpus:
    """Read Python's own help topics, about 465k characters; they change with the version of Python.

    Returns:
        The text and its usable lines, in a fixed random order, each once.
    """
    from pydoc_data.topics import topics  # half a megabyte of literals: only where it is used

    text = "\n\n".join(topics[name] for name in sorted(topics))
    # Repeated lines would be in the training set and held out at the same time.
    lines = [line for line in dict.fromkeys(_cut(line) for line in text.splitlines()) if len(line) >= MIN_CHARACTERS]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(PERMUTATION_SEED))
    return Corpus(text=text, lines=tuple(lines[i] for i in order.tolist()))


def _cut(line: str) -> str:
    """At most 32 characters, without white space at either end."""
    return line.strip()[:MAX_CHARACTERS].rstrip()


class TextWorkload(Workload):
    """Next-character prediction; a line of L characters has L - 1 loss terms.

    inputs [n, T] int64 are characters 1 to L - 1 and targets [n, T] int64 characters 2 to L; padding comes last (index 0 in
    the inputs, -100 in the targets) and T is the longest line of the batch less one. `held_out.ids` go on after the training
    set's.
    """

    def __init__(self, corpus: Corpus, make_model: Callable[[int], nn.Module], *, device: torch.device) -> None:
        """`make_model` takes the size of the vocabulary, padding included."""
        index = {character: i for i, character in enumerate(corpus.vocabulary, start=PADDING + 1)}
        num_held_out = min(MAX_HELD_OUT, max(1, len(corpus.lines) // 8))
        self.num_samples = min(MAX_TRAIN, len(corpus.lines) - num_held_out)
        self.vocabulary_size = len(index) + 1
        self._make_model = make_model
        lines = corpus.lines[: self.num_samples + num_held_out]
        characters = torch.full((len(lines), MAX_CHARACTERS), PADDING)
        for row, line in enumerate(lines):
            characters[row, : len(line)] = torch.tensor([index[character] for character in line])
        self._lengths = torch.tensor([len(line) for line in lines])  # on the CPU: trimming a batch never waits for the device
        self._characters = characters.to(device)
        self.held_out = self.batch(torch.arange(self.num_samples, len(lines)))

    def make_model(self) -> nn.Module:
        """The model for this vocabulary, padding included."""
        return self._make_model(self.vocabulary_size)

    def batch(self, ids: Tensor) -> Batch:
        """The lines `ids`, padded to the longest of them."""
        rows = self._characters[ids.to(self._characters.device, non_blocking=True), : int(self._lengths[ids].max())]
        targets = rows[:, 1:]
        padded = targets == PADDING
        return Batch(ids=ids, inputs=rows[:, :-1].masked_fill(padded, PADDING), targets=targets.masked_fill(padded, IGNORED))

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] sum over a line's characters of the cross-entropy of `outputs` [n, T, V], in float32 or float64."""
        terms = F.cross_entropy(wide(outputs).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
        return terms.view(batch.targets.shape).sum(1)

    def num_terms(self, batch: Batch) -> Tensor:
        """[n] characters that are predicted: those of the line but the first."""
        return (batch.targets != IGNORED).sum(1)

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] characters whose most likely prediction is right."""
        return (outputs.argmax(2) == batch.targets).sum(1)
