import pytest
import torch
import torch.nn.functional as F

from accumulation_harness.config import Data, Model, TrialConfig, WorkloadConfig
from accumulation_harness.workloads.build import make_workload

CPU = torch.device("cpu")
IDS = torch.arange(40, 75)
KINDS = (Data.digits, Data.class_weights, Data.ignored_labels)


def config(data):
    return TrialConfig(workload=WorkloadConfig(data=data, model=Model.mlp))


def mean_loss(data):
    """The workload's mean loss over IDS, and that of `torch.nn.functional.cross_entropy` with the same weights."""
    workload = make_workload(config(data), device=CPU, dtype=torch.float64)
    batch = workload.batch(IDS)
    outputs = torch.randn(len(IDS), 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = workload.losses(outputs, batch).sum() / workload.num_terms(batch).sum()
    targets = batch.targets.clone()
    if data == Data.class_weights:
        return own, F.cross_entropy(outputs, targets, weight=torch.arange(1, 11, dtype=torch.float64))
    if data == Data.ignored_labels:
        targets[IDS % 3 == 0] = -100
    return own, F.cross_entropy(outputs, targets, ignore_index=-100)


@pytest.mark.parametrize("data", KINDS)
def test_the_loss_is_the_reduction_of_cross_entropy(data):
    own, by_torch = mean_loss(data)
    torch.testing.assert_close(own, by_torch, rtol=1e-14, atol=0)
