"""scikit-learn's handwritten digits: 1,797 real 8x8 images that come with the package."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

from harness.workloads.images import ImageSet

NUM_TRAIN = 1500
PERMUTATION_SEED = 20240601  # of the split; never a trial's seed: all trials train on the same samples


def read_digits() -> ImageSet:
    """1,500 training and 297 held-out images [1, 8, 8] in [0, 1] (16 grey levels)."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(PERMUTATION_SEED))
    images = torch.from_numpy(digits.images).to(torch.uint8).unsqueeze(1)[order]
    labels = torch.from_numpy(digits.target).long()[order]
    return ImageSet(
        images=images[:NUM_TRAIN],
        labels=labels[:NUM_TRAIN],
        held_out_images=images[NUM_TRAIN:],
        held_out_labels=labels[NUM_TRAIN:],
        peak=16.0,
        mean=(0.0,),
        std=(1.0,),
    )
