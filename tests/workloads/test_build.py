"""Models have the sizes that their descriptions say, and dropout where it is asked for."""

import torch

from accumulation_harness.config import Data, Model, Norm, TrialConfig, WorkloadConfig
from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.image_models import make_resnet18

CPU = torch.device("cpu")


def trial(model, norm, *, dropout=0.0):
    data = Data.text if model == Model.transformer else Data.digits
    width = 1 if model == Model.resnet18 else 8
    return TrialConfig(workload=WorkloadConfig(data=data, model=model, width=width, dropout=dropout), norm=norm)


def build(model, norm, dtype=torch.float64, *, dropout=0.0):
    workload = make_workload(trial(model, norm, dropout=dropout), device=CPU, dtype=dtype)
    torch.manual_seed(0)
    return workload, workload.make_model().to(dtype)


def parameter_count(net):
    return sum(p.numel() for p in net.parameters())


def test_sizes():
    # The published CIFAR form of ResNet-18 has 11,173,962 parameters.
    assert parameter_count(make_resnet18((3, 32, 32), width=8, norm=Norm.batch)) == 11_173_962
    _, conv = build(Model.conv, Norm.batch)
    assert parameter_count(conv) == 9 * 8 + 2 * 8 + 9 * 8 * 16 + 2 * 16 + 256 * 10 + 10
    _, transformer = build(Model.transformer, Norm.layer)
    assert 15_000 < parameter_count(transformer) < 25_000
