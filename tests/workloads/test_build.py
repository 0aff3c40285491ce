"""Models have the sizes that their descriptions say."""

import pytest
import torch

from accumulation_harness.config import Norm
from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.image_models import make_resnet18
from tests.toy import CPU
from tests.trials import trial


def model(settings):
    return make_workload(trial(settings), device=CPU, dtype=torch.float64).make_model()


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda: make_resnet18((3, 32, 32), width=8, norm=Norm.batch), 11_173_962),  # as published for CIFAR
        (lambda: model("norm=batch"), 9 * 8 + 2 * 8 + 9 * 8 * 16 + 2 * 16 + 256 * 10 + 10),
        (lambda: model("workload.data=text workload.model=transformer norm=layer"), pytest.approx(20_000, rel=0.25)),
    ],
)
def test_sizes(make, number):
    assert sum(p.numel() for p in make().parameters()) == number
