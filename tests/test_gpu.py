"""The same claims on a CUDA device; `make gpu` runs these where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.config import (
    Data,
    Device,
    Model,
    Norm,
    OptimizerConfig,
    OptimizerName,
    Precision,
    Split,
    TrialConfig,
    WorkloadConfig,
)
from harness.trial import run_trial

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ADAM = OptimizerConfig(name=OptimizerName.adam, lr=3e-3)
TEXT = WorkloadConfig(data=Data.text, model=Model.transformer)
RESNET = WorkloadConfig(model=Model.resnet18)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(
    "changes",
    [
        {"norm": Norm.none},
        {"norm": Norm.group},
        {"workload": TEXT, "norm": Norm.layer, "split": Split.ragged},
        {"workload": RESNET, "norm": Norm.group, "steps": 5, "algebra_steps": 5},
    ],
    ids=str,
)
def test_correct_accumulation_is_equivalent_on_cuda(changes: dict[str, Any], precision: Precision) -> None:
    settings = {"steps": 26, "algebra_steps": 26, **changes}
    config = TrialConfig(device=Device.cuda, precision=precision, optimizer=ADAM, accumulation_steps=(4,), **settings)
    for row in run_trial(config, lambda step, rows: None).arms:
        assert (row["verdict"], row["reasons"]) == ("equivalent", [])


def test_batch_norm_is_explained_on_cuda() -> None:
    config = TrialConfig(
        device=Device.cuda, workload=RESNET, norm=Norm.batch, optimizer=ADAM, accumulation_steps=(4,), steps=5, algebra_steps=5
    )
    accumulated, null = run_trial(config, lambda step, rows: None).arms
    assert (accumulated["verdict"], accumulated["cause"], accumulated["explained"]) == ("different", "batch_statistics", True)
    assert null["verdict"] == "equivalent"


def test_cpu_and_cuda_agree_in_float64() -> None:
    losses: dict[str, list[float]] = {}
    for device in (Device.cpu, Device.cuda):
        found = losses.setdefault(device, [])
        config = TrialConfig(device=device, precision=Precision.float64, steps=5, algebra_steps=1, accumulation_steps=(4,))
        run_trial(config, lambda step, rows, found=found: found.append(rows[1]["loss"]))  # type: ignore[misc]
    assert losses["cpu"] == pytest.approx(losses["cuda"], rel=1e-10)
