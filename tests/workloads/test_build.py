"""Every model with every normalisation couples samples under BatchNorm only."""

import pytest
import torch

from accumulation_harness.config import Data, Model, Norm, TrialConfig, WorkloadConfig
from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.image_models import make_resnet18

CPU = torch.device("cpu")
PAIRS = [(model, norm) for model in (Model.conv, Model.mlp, Model.resnet18) for norm in Norm if norm != Norm.as_is] + [
    (Model.transformer, Norm.layer),
    (Model.transformer, Norm.none),
]
# Rounding of float64 in a net of twenty layers stays below the first; coupling through batch statistics is far above the second.
ROUNDING, COUPLED = 1e-11, 1e-4


def trial(model, norm, *, dropout=0.0):
    data = Data.text if model == Model.transformer else Data.digits
    width = 1 if model == Model.resnet18 else 8
    return TrialConfig(workload=WorkloadConfig(data=data, model=model, width=width, dropout=dropout), norm=norm)


def build(model, norm, dtype=torch.float64, *, dropout=0.0):
    workload = make_workload(trial(model, norm, dropout=dropout), device=CPU, dtype=dtype)
    torch.manual_seed(0)
    return workload, workload.make_model().to(dtype)


def gradients(workload, model, ids):
    """Gradient of the summed loss of `ids`, all in one batch."""
    batch = workload.batch(ids)
    return list(torch.autograd.grad(workload.losses(model(batch.inputs), batch).sum(), list(model.parameters())))


@pytest.mark.parametrize(("model", "norm"), PAIRS)
def test_batch_norm_couples_samples_and_nothing_else_does(model, norm):
    workload, net = build(model, norm)
    ids = torch.arange(8)
    whole = gradients(workload, net, ids)
    parts = [gradients(workload, net, half) for half in (ids[:4], ids[4:])]
    distance = torch.stack([(w - a - b).norm() for w, a, b in zip(whole, *parts, strict=True)]).norm()
    relative = float(distance / torch.stack([w.norm() for w in whole]).norm())
    if norm == Norm.batch:
        assert relative > COUPLED
    else:
        assert relative < ROUNDING


def parameter_count(net):
    return sum(p.numel() for p in net.parameters())


def test_sizes():
    # The published CIFAR form of ResNet-18 has 11,173,962 parameters.
    assert parameter_count(make_resnet18((3, 32, 32), width=8, norm=Norm.batch)) == 11_173_962
    _, conv = build(Model.conv, Norm.batch)
    assert parameter_count(conv) == 9 * 8 + 2 * 8 + 9 * 8 * 16 + 2 * 16 + 256 * 10 + 10
    _, transformer = build(Model.transformer, Norm.layer)
    assert 15_000 < parameter_count(transformer) < 25_000
