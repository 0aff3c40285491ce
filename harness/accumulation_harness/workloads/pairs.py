"""Contrastive pairs: the left and the right half of a digit, found among the halves of the other digits of the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accumulation_harness.config import Norm
from accumulation_harness.judge.cause import Cause
from accumulation_harness.workloads import Batch, wide
from accumulation_harness.workloads.image_models import make_mlp
from accumulation_harness.workloads.images import ImageWorkload, Shape

TEMPERATURE = 0.2
EMBEDDING = 16


class TwoTowers(nn.Module):
    """[n, C, H, W] -> [n, 2, 16]: each half of the image through a perceptron of its own."""

    def __init__(self, shape: Shape, *, width: int, norm: Norm, dropout: float = 0.0) -> None:
        super().__init__()
        channels, height, side = shape
        self.middle = side // 2
        halves = ((channels, height, self.middle), (channels, height, side - self.middle))
        self.left, self.right = (
            make_mlp(half, width=width, norm=norm, dropout=dropout, num_classes=EMBEDDING) for half in halves
        )

    def forward(self, images: Tensor) -> Tensor:
        """[n, C, H, W] -> [n, 2, 16], the embeddings of the left and of the right half."""
        return torch.stack([self.left(images[..., : self.middle]), self.right(images[..., self.middle :])], 1)


class PairsWorkload(ImageWorkload):
    """InfoNCE (van den Oord et al., arXiv:1807.03748) in both directions: the other images of the batch are the negatives.

    Labels are not used. A sample's loss depends on all samples it is computed with: micro-batches have fewer negatives.
    """

    coupling = Cause.non_separable_loss

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] half the sum of the cross-entropies of left among rights and right among lefts; cosine over 0.2 as score."""
        scores, own = self._scores(outputs), torch.arange(len(batch), device=outputs.device)
        return 0.5 * (F.cross_entropy(scores, own, reduction="none") + F.cross_entropy(scores.T, own, reduction="none"))

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] whether the right half that is nearest to a left half is its own."""
        return (self._scores(outputs).argmax(1) == torch.arange(len(batch), device=outputs.device)).long()

    def _scores(self, outputs: Tensor) -> Tensor:
        left, right = F.normalize(wide(outputs), dim=2).unbind(1)
        return left @ right.T / TEMPERATURE
