"""scikit-learn's handwritten digits: 1,797 real 8x8 images that come with the package."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from accumulation_harness.workloads.images import ImageSet

NUM_TRAIN = 1500
PERMUTATION_SEED = 20240601  # of the split; never a trial's seed: all trials train on the same samples


def read_digits() -> ImageSet:
    """1,500 training and 297 held-out images [1, 8, 8] in [0, 1] (16 grey levels)."""
    table = torch.from_numpy(_table())
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(PERMUTATION_SEED))
    images = table[order, :-1].to(torch.uint8).view(-1, 1, 8, 8)
    labels = table[order, -1].long()
    return ImageSet(
        images=images[:NUM_TRAIN],
        labels=labels[:NUM_TRAIN],
        held_out_images=images[NUM_TRAIN:],
        held_out_labels=labels[NUM_TRAIN:],
        peak=16.0,
        mean=(0.0,),
        std=(1.0,),
    )


def _table() -> NDArray[np.float64]:
    """[1797, 65] of scikit-learn's file: 64 pixels and the label, as its `load_digits` reads them.

    Importing scikit-learn for it takes a second, in every trial's process.
    """
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None, "scikit-learn is a requirement of this project"
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        return np.loadtxt(file, delimiter=",")
