"""Digits: the split is fixed, the pixels are right, and float64 sees what float32 sees."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

from accumulation_harness.config import Data, Model, TrialConfig, WorkloadConfig
from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.images import ImageWorkload

CPU = torch.device("cpu")


def digits(dtype: torch.dtype = torch.float32, *, seed: int = 0, model: Model = Model.conv) -> ImageWorkload:
    config = TrialConfig(workload=WorkloadConfig(data=Data.digits, model=model), seed=seed)
    workload = make_workload(config, device=CPU, dtype=dtype)
    assert isinstance(workload, ImageWorkload)
    return workload


def test_training_and_held_out_samples_are_all_of_the_digits_once() -> None:
    workload = digits(torch.float64)
    train = workload.batch(torch.arange(workload.num_samples))
    images = torch.cat([train.inputs, workload.held_out.inputs]).flatten(1)
    labels = torch.cat([train.targets, workload.held_out.targets])
    source = load_digits()
    found = sorted((*row, label) for row, label in zip((images * 16).tolist(), labels.tolist(), strict=True))
    assert found == sorted((*row, label) for row, label in zip(source.data.tolist(), source.target.tolist(), strict=True))
    assert torch.equal(torch.cat([train.ids, workload.held_out.ids]), torch.arange(1797))


def test_float64_inputs_are_the_float32_ones() -> None:
    for model in (Model.conv, Model.resnet18):
        wide, narrow = digits(torch.float64, model=model).held_out.inputs, digits(model=model).held_out.inputs
        assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
        assert torch.equal(wide, narrow.double())
