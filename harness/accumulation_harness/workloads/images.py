"""Image classification: pixels that stay as stored until a batch is taken, and cross-entropy per image, weighted perhaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accumulation_harness.workloads import Batch, Workload, wide

NUM_CLASSES = 10
Shape = tuple[int, int, int]  # (C, H, W)
IGNORED_EVERY = 3  # training ids are in a random order, so any third is as good as another


@dataclass(frozen=True)
class ImageSet:
    """Images and labels on the CPU; a pixel x becomes x / peak."""

    images: Tensor  # [n, C, H, W] uint8, or float32 after `resized`
    labels: Tensor  # [n] int64
    held_out_images: Tensor  # [m, C, H, W]
    held_out_labels: Tensor  # [m] int64
    peak: float = 1.0

    @staticmethod
    def cut(images: Tensor, labels: Tensor, num_train: int, peak: float = 1.0) -> ImageSet:
        """The first `num_train` to train on, the others held out."""
        return ImageSet(images[:num_train], labels[:num_train], images[num_train:], labels[num_train:], peak)

    @property
    def shape(self) -> Shape:
        """(C, H, W) of one image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def resized(self, size: int) -> ImageSet:
        """The same set with its images scaled bilinearly to `size` x `size`."""

        def resize(images: Tensor) -> Tensor:
            return F.interpolate(images.float(), size=(size, size), mode="bilinear", align_corners=False)

        return replace(self, images=resize(self.images), held_out_images=resize(self.held_out_images))


class ImageWorkload(Workload):
    """Ten-class image classification; one loss term per image.

    Pixels are scaled in float32 and only then converted: the float64 batch is exactly the float32 one, so that a float64
    referee and a float32 arm differ in their arithmetic alone. `held_out.ids` go on after the training set's.
    """

    def __init__(
        self, data: ImageSet, make_model: Callable[[Shape], nn.Module], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_samples = len(data.labels)
        self._shape = data.shape
        self._make_model = make_model
        self._dtype = dtype
        self._images = data.images.to(device)
        self._labels = data.labels.to(device)
        self._peak = data.peak
        self.held_out = Batch(
            ids=torch.arange(self.num_samples, self.num_samples + len(data.held_out_labels)),
            inputs=self._scaled(data.held_out_images.to(device)),
            targets=data.held_out_labels.to(device),
        )

    def make_model(self) -> nn.Module:
        """The model for images of this shape."""
        return self._make_model(self._shape)

    def batch(self, ids: Tensor) -> Batch:
        """inputs [n, C, H, W] in the workload's dtype, targets [n] int64."""
        index = ids.to(self._labels.device, non_blocking=True)
        return Batch(ids=ids, inputs=self._scaled(self._images[index]), targets=self._labels[index])

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] cross-entropy -log softmax(outputs)[target] of `outputs` [n, 10], in float32 or float64."""
        return F.cross_entropy(wide(outputs), batch.targets, reduction="none")

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] whether the most likely class is the target."""
        return (outputs.argmax(1) == batch.targets).long()

    def _scaled(self, pixels: Tensor) -> Tensor:
        return (pixels.float() / self._peak).to(self._dtype)


class ClassWeights(ImageWorkload):
    """The mean loss of `CrossEntropyLoss(weight=...)`, sum_i w_i l_i / sum_i w_i: class c weighs c + 1.

    Weights are whole numbers, so that a sample of weight w has w loss terms and every sum of them is exact. Nothing is lost by
    that: a weighted mean does not change when all its weights are multiplied by one number.
    """

    def num_terms(self, batch: Batch) -> Tensor:
        """[n] int64, w_i = c + 1 of class c."""
        return batch.targets + 1

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] w_i l_i."""
        return super().losses(outputs, batch) * self.num_terms(batch)

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] w_i where the most likely class is the target: accuracy weighs as the loss does."""
        return super().correct(outputs, batch) * self.num_terms(batch)


class IgnoredLabels(ClassWeights):
    """The mean loss of `CrossEntropyLoss(ignore_index=...)`: every third sample has no label and weighs 0, the others 1."""

    def num_terms(self, batch: Batch) -> Tensor:
        """[n] int64: 0 for every third id, 1 for the others."""
        return (batch.ids % IGNORED_EVERY > 0).long().to(batch.targets.device, non_blocking=True)
