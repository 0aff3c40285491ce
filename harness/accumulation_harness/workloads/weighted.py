"""Losses whose terms do not weigh alike: class weights, and labels that are ignored.

Weights are whole numbers, so that a sample of weight w has w loss terms and every sum of them is exact. Nothing is lost by that:
a weighted mean does not change when all its weights are multiplied by one number.
"""

from __future__ import annotations

from torch import Tensor

from accumulation_harness.workloads import Batch
from accumulation_harness.workloads.images import ImageWorkload

IGNORED_EVERY = 3  # training ids are in a random order, so any third is as good as another


class ClassWeights(ImageWorkload):
    """The mean loss of `CrossEntropyLoss(weight=...)`, sum_i w_i l_i / sum_i w_i: class c weighs c + 1."""

    def weights(self, batch: Batch) -> Tensor:
        """[n] int64, w_i = c + 1 of class c."""
        return batch.targets + 1

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] w_i l_i."""
        return super().losses(outputs, batch) * self.weights(batch)

    def num_terms(self, batch: Batch) -> Tensor:
        """[n] w_i."""
        return self.weights(batch)

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] w_i where the most likely class is the target: accuracy weighs as the loss does."""
        return super().correct(outputs, batch) * self.weights(batch)


class IgnoredLabels(ClassWeights):
    """The mean loss of `CrossEntropyLoss(ignore_index=...)`: every third sample has no label and weighs 0, the others 1."""

    def weights(self, batch: Batch) -> Tensor:
        """[n] int64: 0 for every third id, 1 for the others."""
        return (batch.ids % IGNORED_EVERY > 0).long().to(batch.targets.device, non_blocking=True)
