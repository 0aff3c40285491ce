"""Image classifiers: a two-layer convolutional net, a perceptron, and ResNet-18 in its CIFAR form.

Layers before a normalisation have no bias: BatchNorm subtracts it again, and a parameter whose true gradient is zero would
only show rounding noise. Nothing works in place, so that `torch.func` can differentiate per sample.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from accumulation_harness.config import Norm
from accumulation_harness.workloads.images import NUM_CLASSES, Shape

POOLED = 4  # side of the feature maps that the convolutional net's last layer sees


def _make_norm(norm: Norm, channels: int, dims: int, *, max_groups: int = 4) -> nn.Module:
    """Make the normalisation of [n, channels] (dims=0) or [n, channels, H, W] (dims=2).

    `batch` couples the samples of a batch; the others do not. `layer` on feature maps is GroupNorm with one group: mean and
    variance over all of C, H, W, scale and shift per channel.

    Args:
        norm: Which.
        channels: Of what it normalises.
        dims: 0 or 2 spatial dimensions.
        max_groups: `group` takes the largest divisor of `channels` up to this (32 in Wu & He, arXiv:1803.08494).

    Returns:
        The layer; the identity for `none`.
    """
    match norm:
        case Norm.batch:
            return nn.BatchNorm2d(channels) if dims else nn.BatchNorm1d(channels)
        case Norm.group:
            return nn.GroupNorm(max(g for g in range(1, max_groups + 1) if channels % g == 0), channels)
        case Norm.layer:
            return nn.GroupNorm(1, channels) if dims else nn.LayerNorm(channels)
        case _:
            return nn.Identity()


def make_conv(shape: Shape, *, width: int, norm: Norm, dropout: float = 0.0) -> nn.Sequential:
    """Make Conv-norm-ReLU, Conv(stride 2)-norm-ReLU, Linear.

    Maps larger than 4x4 after the second convolution are average-pooled to 4x4.

    Args:
        shape: (C, H, W) of an image, with H = W >= 7.
        width: Channels of the first convolution; the second has twice as many.
        norm: The normalisation after each convolution.
        dropout: Probability before the last layer.

    Returns:
        A model from [n, C, H, W] to [n, 10].
    """
    channels, side, _ = shape
    bias = norm == Norm.none
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=bias),
        _make_norm(norm, width, 2),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=bias),
        _make_norm(norm, 2 * width, 2),
        nn.ReLU(),
        *_pooling((side + 1) // 2),
        nn.Flatten(),
        *dropping(dropout),
        nn.Linear(2 * width * POOLED**2, NUM_CLASSES),
    )


def make_conv1d(shape: Shape, *, width: int, norm: Norm, dropout: float = 0.0) -> nn.Sequential:
    """Make three of Conv-norm-ReLU along the last axis (5, 3 and 3 places wide, stride 2), and a Linear.

    mnist1d's own net has 25 channels and no normalisation.

    Args:
        shape: (C, 1, L) of a signal, with L >= 8; L = 40 leaves 5 places.
        width: A third of the channels of each convolution.
        norm: The normalisation after each convolution.
        dropout: Probability before the last layer.

    Returns:
        A model from [n, C, 1, L] to [n, 10].
    """
    channels, _, length = shape
    hidden = 3 * width
    layers: list[nn.Module] = []
    for channels_in, reach in ((channels, 5), (hidden, 3), (hidden, 3)):
        layers += [
            nn.Conv2d(channels_in, hidden, (1, reach), stride=(1, 2), padding=(0, 1), bias=norm == Norm.none),
            _make_norm(norm, hidden, 2),
            nn.ReLU(),
        ]
        length = (length + 2 - reach) // 2 + 1
    return nn.Sequential(*layers, nn.Flatten(), *dropping(dropout), nn.Linear(hidden * length, NUM_CLASSES))


def make_mlp(shape: Shape, *, width: int, norm: Norm, dropout: float = 0.0, num_classes: int = 10) -> nn.Sequential:
    """Two hidden layers of 8 * width units, each Linear-norm-ReLU, and a Linear.

    Args:
        shape: Channels, height and width of an image.
        width: 1/8 of the hidden units.
        norm: Normalisation after each hidden layer.
        dropout: Probability.
        num_classes: C.

    Returns:
        A model of [n, channels, height, width] -> [n, C] logits.
    """
    channels, height, side = shape
    hidden = 8 * width
    bias = norm == Norm.none
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * side, hidden, bias=bias),
        _make_norm(norm, hidden, 0),
        nn.ReLU(),
        nn.Linear(hidden, hidden, bias=bias),
        _make_norm(norm, hidden, 0),
        nn.ReLU(),
        *dropping(dropout),
        nn.Linear(hidden, num_classes),
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, projected where the shape changes (He et al., arXiv:1512.03385, section 4.2)."""

    def __init__(self, channels_in: int, channels: int, *, stride: int, norm: Norm) -> None:
        super().__init__()
        bias = norm == Norm.none
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1, stride=stride, bias=bias)
        self.norm1 = _make_norm(norm, channels, 2, max_groups=32)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=bias)
        self.norm2 = _make_norm(norm, channels, 2, max_groups=32)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=bias), _make_norm(norm, channels, 2, max_groups=32)
            )

    def forward(self, maps: Tensor) -> Tensor:
        """[n, C_in, H, W] -> [n, C, H / stride, W / stride]."""
        hidden = F.relu(self.norm1(self.conv1(maps)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(maps))


class GlobalAverage(nn.Module):
    """[n, C, H, W] -> [n, C]; a plain mean, whose gradient on CUDA is deterministic unlike that of adaptive pooling."""

    def forward(self, maps: Tensor) -> Tensor:
        """[n, C, H, W] -> [n, C], means over the places."""
        return maps.mean((2, 3))


def make_resnet18(shape: Shape, *, width: int, norm: Norm, dropout: float = 0.0) -> nn.Sequential:
    """ResNet-18 for 32x32 images: 3x3 stem, stages of 8, 16, 32 and 64 times `width` channels with two blocks each.

    Args:
        shape: Channels, height and width of an image.
        width: 1/8 of the first stage's channels.
        norm: Normalisation after each convolution.
        dropout: Probability, before the last layer.

    Returns:
        A model of [n, channels, height, width] -> [n, 10] logits.
    """
    base = 8 * width
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], base, 3, padding=1, bias=norm == Norm.none),
        _make_norm(norm, base, 2, max_groups=32),
        nn.ReLU(),
    ]
    channels_in = base
    for stage in range(4):
        channels = base * 2**stage
        layers.append(BasicBlock(channels_in, channels, stride=1 if stage == 0 else 2, norm=norm))
        layers.append(BasicBlock(channels, channels, stride=1, norm=norm))
        channels_in = channels
    return nn.Sequential(*layers, GlobalAverage(), *dropping(dropout), nn.Linear(channels_in, NUM_CLASSES))


def _pooling(side: int) -> list[nn.Module]:
    """Average square maps to 4x4.

    A fixed window of side - 3 * (side // 4) at stride side // 4 covers every row, as adaptive pooling does (the same
    operation where 4 divides `side`), and unlike it has a deterministic gradient on CUDA.

    Args:
        side: H = W of the maps, at least 4.

    Returns:
        One layer, or none where the maps are 4x4.
    """
    stride = side // POOLED
    return [] if side == POOLED else [nn.AvgPool2d(side - (POOLED - 1) * stride, stride)]


def dropping(probability: float) -> list[nn.Module]:
    """Dropout, or no layer at all: then a training step draws nothing from the random generator.

    Args:
        probability: Probability of dropping a value.

    Returns:
        One layer, or none for probability 0.
    """
    return [nn.Dropout(probability)] if probability else []
