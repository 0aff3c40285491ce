"""scikit-learn's handwritten digits: 1,797 real 8x8 images that come with the package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from accumulation_harness.workloads.images import ImageSet

NUM_TRAIN = 1500
PERMUTATION_SEED = 20240601  # of the split; never a trial's seed: all trials train on the same samples


def read_digits() -> ImageSet:
    """Read the digits from scikit-learn's file.

    Importing scikit-learn for its `load_digits` takes a second, in every trial's process.

    Returns:
        1,500 training and 297 held-out images [1, 8, 8] in [0, 1] (16 grey levels).
    """
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None, "scikit-learn is a requirement of this project"
    table = torch.from_numpy(np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=","))
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(PERMUTATION_SEED))
    images, labels = table[order, :-1].to(torch.uint8).view(-1, 1, 8, 8), table[order, -1].long()
    return ImageSet.cut(images, labels, NUM_TRAIN, peak=16.0)
