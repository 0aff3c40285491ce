"""ResNet-50 as torchvision builds it (He et al., arXiv:1512.03385; the stride in the 3x3 convolution), on small images."""

import torch
from torch import Tensor, nn

from tests.own.tasks import Images

SAMPLES = 64  # trained on; another 8 are held out


def convolution(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with BatchNorm after each, beside the identity or a projection."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv1, self.bn1 = convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        projection = convolution(inputs, 4 * width, 1, stride), nn.BatchNorm2d(4 * width)
        self.downsample = nn.Sequential(*projection) if stride > 1 or inputs != 4 * width else nn.Identity()

    def forward(self, x):
        hidden = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        out: Tensor = self.relu(self.bn3(self.conv3(hidden)) + self.downsample(x))
        return out


def resnet(blocks, width, classes):
    """(3, 4, 6, 3) blocks of width 64 are ResNet-50."""
    layers: list[nn.Module] = [convolution(3, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, number in enumerate(blocks):
        for block in range(number):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Photographs(Images):
    """Random images of 1,000 classes."""

    def __init__(self, width=64, size=64):
        self.width, self.samples = width, SAMPLES
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(SAMPLES + 8, 3, size, size, generator=generator)
        self.labels = torch.randint(1000, (SAMPLES + 8,), generator=generator)

    def model(self, norm):
        return resnet((3, 4, 6, 3), self.width, 1000)
