"""Image classification: pixels that stay as stored until a batch is taken, and cross-entropy per image."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accumulation_harness.workloads import Batch, Workload

NUM_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Images and labels on the CPU; a pixel x of channel c becomes (x / peak - mean[c]) / std[c]."""

    images: Tensor  # [n, C, H, W] uint8, or float32 after `resized`
    labels: Tensor  # [n] int64
    held_out_images: Tensor  # [m, C, H, W]
    held_out_labels: Tensor  # [m] int64
    peak: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def fingerprint(self) -> str:
        """SHA-256 of all stored pixels and labels."""
        digest = hashlib.sha256()
        for tensor in (self.images, self.labels, self.held_out_images, self.held_out_labels):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

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
        self, data: ImageSet, make_model: Callable[[tuple[int, int, int]], nn.Module], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_samples = len(data.labels)
        self.fingerprint = data.fingerprint()
        self._shape = data.shape
        self._make_model = make_model
        self._dtype = dtype
        self._images = data.images.to(device)
        self._labels = data.labels.to(device)
        self._peak = data.peak
        self._mean = torch.tensor(data.mean, device=device).view(-1, 1, 1)
        self._std = torch.tensor(data.std, device=device).view(-1, 1, 1)
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
        wide = outputs if outputs.dtype == torch.float64 else outputs.float()
        return F.cross_entropy(wide, batch.targets, reduction="none")

    def num_terms(self, batch: Batch) -> Tensor:
        """[n] ones."""
        return torch.ones_like(batch.targets)

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] whether the most likely class is the target."""
        return (outputs.argmax(1) == batch.targets).long()

    def _scaled(self, pixels: Tensor) -> Tensor:
        return ((pixels.float() / self._peak - self._mean) / self._std).to(self._dtype)
