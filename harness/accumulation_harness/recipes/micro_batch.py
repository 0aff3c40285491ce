"""Windows of samples, and how a window is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from accumulation_harness.config import LastWindow

SplitPlan = Callable[[int], list[int]]  # samples of a window -> sizes of its micro-batches, each at least 1


@dataclass(frozen=True)
class Even:
    """Micro-batches of `micro_batch` samples; the last of a short window is smaller."""

    micro_batch: int

    def __call__(self, window_size: int) -> list[int]:
        """Sizes of the micro-batches of a window of `window_size` samples."""
        full, rest = divmod(window_size, self.micro_batch)
        return [self.micro_batch] * full + [rest] * (rest > 0)


@dataclass(frozen=True)
class Ragged:
    """`num` micro-batches of deliberately unequal sizes, rising about linearly; a short window has proportionally fewer.

    Equal sizes would hide faults of weighting, so the sizes differ even where `num` divides the window.
    """

    num: int
    effective_batch: int

    def __call__(self, window_size: int) -> list[int]:
        """Sizes of the micro-batches of a window of `window_size` samples."""
        num = min(window_size, max(1, -(-self.num * window_size // self.effective_batch)))
        spare = window_size - num  # every micro-batch has one sample; the rest is dealt out as a ramp 1 : 2 : ... : num
        edges = [spare * k * (k + 1) // (num * (num + 1)) for k in range(num + 1)]
        return [1 + edges[k + 1] - edges[k] for k in range(num)]


def windows(num_samples: int, effective_batch: int, seed: int, last_window: LastWindow) -> Iterator[Tensor]:
    """Draw windows of samples without end: each epoch a fresh permutation, cut into windows.

    The remainder of an epoch is a short window of its own (`keep`) or left out (`drop`); windows never straddle epochs.

    Args:
        num_samples: Samples in the data set.
        effective_batch: B, samples in a full window.
        seed: What the permutations are drawn from, together with the epoch.
        last_window: What becomes of the remainder.

    Yields:
        [n] int64 ids of the samples of a window, n <= B.
    """
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(hash_seed(seed, epoch))
        for window in torch.randperm(num_samples, generator=generator).split(effective_batch):
            if len(window) == effective_batch or last_window == LastWindow.keep:
                yield window
        epoch += 1


def hash_seed(*parts: int) -> int:
    """Mix several integers into one seed, so that no two streams of a trial share a generator state.

    Args:
        parts: What tells the stream from others: seed, epoch, purpose.

    Returns:
        An integer below 2^63.
    """
    mixed = 0
    for part in parts:
        mixed = (mixed * 6364136223846793005 + part + 1442695040888963407) % 2**64
        mixed ^= mixed >> 29
    return mixed % 2**63
