"""mnist1d: digits of one dimension from their own generator (Greydanus, arXiv:2011.14439), drawn here and never downloaded.

A template of 12 values per digit is padded, dilated, scaled, shifted around, filled with correlated noise where it was padded,
blurred with white noise, sheared and sampled at 40 places. The recipe and its constants are the published ones; the random
numbers are not, since every step is drawn for all samples at once.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from accumulation_harness.workloads.images import ImageSet

NUM_TRAIN, NUM_TEST = 20_000, 10_000
SEED = 42  # of the samples; which of them are tested on is drawn from the trial's seed
PADDING = (36, 60)  # zeros behind the template, both included
LENGTH = 72  # after dilation: the template and the longest padding
SCALE, TRANSLATION, SHEAR = 0.4, 48, 0.75
CORRELATED_NOISE, WHITE_NOISE, BLUR = 0.25, 0.02, 2.0
PLACES = 40
EPS = 1e-8  # added to the template, so that its own zeros are not taken for padding
Values = NDArray[np.float64]

TEMPLATES = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)


def read_mnist1d(seed: int) -> ImageSet:
    """20,000 training and 10,000 test images [1, 1, 40], the same 30,000 for every seed, split by `seed`.

    Args:
        seed: Seed of the split.

    Returns:
        Training and test images with their labels.
    """
    samples, labels = generate(NUM_TRAIN + NUM_TEST, SEED)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = torch.from_numpy(samples[order].astype(np.float32)).view(-1, 1, 1, PLACES)
    return ImageSet.cut(images, torch.from_numpy(labels[order]), NUM_TRAIN)


def generate(num_samples: int, seed: int) -> tuple[Values, NDArray[np.int64]]:
    """Samples [n, 40] of mean 0 and standard deviation 1 over all values, and labels [n]: as many of every digit, in order.

    Args:
        num_samples: n.
        seed: Seed of the noise.

    Returns:
        Samples and labels.
    """
    from scipy.ndimage import gaussian_filter1d  # scipy is slow to import: only where it is used

    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(TEMPLATES)), num_samples // len(TEMPLATES))
    num = len(labels)
    lengths = len(TEMPLATES[0]) + rng.integers(PADDING[0], PADDING[1], num, endpoint=True)
    padded = np.zeros((num, LENGTH))
    padded[:, : len(TEMPLATES[0])] = templates()[labels] + EPS
    x = _sampled(padded, lengths, LENGTH) * (1 + SCALE * (rng.random((num, 1)) - 0.5))
    shift = rng.integers(0, TRANSLATION, (num, 1))
    x = np.take_along_axis(x, (np.arange(LENGTH) - shift) % LENGTH, axis=1)
    noise = gaussian_filter1d(CORRELATED_NOISE * rng.standard_normal(x.shape), BLUR, axis=1)
    x = np.where(x != 0, x, noise) + WHITE_NOISE * rng.standard_normal(x.shape)
    x = x - SHEAR * (rng.random((num, 1)) - 0.5) * np.linspace(-0.5, 0.5, LENGTH)
    x = _sampled(x, np.full(num, LENGTH), PLACES)
    return (x - x.mean()) / x.std(), labels


def templates() -> Values:
    """[10, 12]: each digit's template, whitened, from 0 to 0, over 6.

    Returns:
        The templates.
    """
    x = np.asarray(TEMPLATES, dtype=np.float64)
    x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    return np.asarray((x - x[:, :1]) / 6)


def _sampled(x: Values, lengths: NDArray[np.int64], places: int) -> Values:
    """[n, places]: the first `lengths[i]` values of row i, linearly interpolated at evenly spaced places from end to end."""
    at = np.linspace(0, 1, places) * (lengths[:, None] - 1)
    left = np.minimum(at.astype(np.int64), lengths[:, None] - 2)
    weight = at - left
    return np.take_along_axis(x, left, 1) * (1 - weight) + np.take_along_axis(x, left + 1, 1) * weight
