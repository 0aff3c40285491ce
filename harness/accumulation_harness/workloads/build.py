"""From a configuration to its workload, by a plain registry."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from accumulation_harness.config import Contrast, Data, Model, Norm, TrialConfig
from accumulation_harness.workloads import Workload
from accumulation_harness.workloads.custom import CustomWorkload
from accumulation_harness.workloads.digits import read_digits
from accumulation_harness.workloads.docstrings import QUERY_LENGTH, DocstringWorkload, read_pairs
from accumulation_harness.workloads.image_models import make_conv, make_conv1d, make_mlp, make_resnet18
from accumulation_harness.workloads.images import ClassWeights, IgnoredLabels, ImageWorkload
from accumulation_harness.workloads.mnist1d import read_mnist1d
from accumulation_harness.workloads.pairs import PairsWorkload, TwoTowers
from accumulation_harness.workloads.policy import PolicyWorkload
from accumulation_harness.workloads.python_bytes import LENGTH, BytesWorkload, read_sources
from accumulation_harness.workloads.text import MAX_CHARACTERS, PADDING, TextWorkload, read_corpus
from accumulation_harness.workloads.towers import TwoTowers as TextTowers
from accumulation_harness.workloads.transformer import Transformer

IMAGE_MODELS = {Model.conv: make_conv, Model.conv1d: make_conv1d, Model.mlp: make_mlp, Model.resnet18: make_resnet18}
IMAGE_WORKLOADS: dict[Data, type[ImageWorkload]] = {
    Data.pairs: PairsWorkload,
    Data.policy: PolicyWorkload,
    Data.class_weights: ClassWeights,
    Data.ignored_labels: IgnoredLabels,
}


def make_workload(config: TrialConfig, *, device: torch.device, dtype: torch.dtype) -> Workload:
    """Make the configured data, model and loss.

    The trial's seed decides which samples of mnist1d and of the Python sources are tested on; no other data depend on it.

    Args:
        config: The settings of the trial.
        device: Where data and model go.
        dtype: The format of floating inputs and of the model.

    Returns:
        The workload.

    Raises:
        ConfigError: Files under `data.root` are missing or damaged, or a task is not what it should be.
    """
    workload: Workload
    match config.workload.data:
        case Data.custom:
            workload = CustomWorkload(config.workload, config.norm, device=device, dtype=dtype)
        case Data.text:
            workload = _text(config, device)
        case Data.python_bytes:
            model = _transformer(config, LENGTH - 1)
            workload = BytesWorkload(read_sources(), model, seed=config.seed, device=device)
        case Data.docstrings:
            workload = _docstrings(config, device)
        case _:
            workload = _images(config, device, dtype)
    workload.penalty = config.workload.penalty
    # BatchNorm of the perceptron has one value per sample and channel; the feature maps of the others are 4x4 or larger.
    workload.smallest_micro_batch = 2 if config.norm == Norm.batch and config.workload.model == Model.mlp else 1
    return workload


def _images(config: TrialConfig, device: torch.device, dtype: torch.dtype) -> ImageWorkload:
    workload = config.workload
    data = read_mnist1d(config.seed) if workload.data == Data.mnist1d else read_digits()
    if workload.model == Model.resnet18 and workload.data == Data.digits:
        data = data.resized(32)
    architecture = TwoTowers if workload.data == Data.pairs else IMAGE_MODELS[workload.model]
    make_model = partial(architecture, width=workload.width, norm=config.norm, dropout=workload.dropout)
    return IMAGE_WORKLOADS.get(workload.data, ImageWorkload)(data, make_model, device=device, dtype=dtype)


def _text(config: TrialConfig, device: torch.device) -> TextWorkload:
    return TextWorkload(read_corpus(), _transformer(config, MAX_CHARACTERS - 1), device=device)


def _transformer(config: TrialConfig, max_length: int) -> Callable[[int], nn.Module]:
    workload = config.workload
    return partial(
        Transformer,
        max_length=max_length,
        padding=PADDING,
        width=workload.width,
        depth=workload.depth,
        norm=config.norm,
        dropout=workload.dropout,
    )


def _docstrings(config: TrialConfig, device: torch.device) -> DocstringWorkload:
    workload = config.workload
    make_model = partial(
        TextTowers,
        width=workload.width,
        dropout=workload.dropout,
        query_length=QUERY_LENGTH,
        has_bias=workload.contrast == Contrast.sigmoid,
    )
    return DocstringWorkload(
        read_pairs(config.data.root),
        make_model,
        contrast=workload.contrast,
        device=device,
    )
