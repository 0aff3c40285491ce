"""The same claims on a CUDA device; `make gpu` runs these where there is one."""

import warnings
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from accumulation_harness.config import (
    Data,
    Device,
    Execution,
    Model,
    Norm,
    OptimizerConfig,
    OptimizerName,
    Precision,
    Split,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.measure.lock_step import REFERENCE, LockStep, Setting
from accumulation_harness.measure.trial import full_batch, run_trial, standard_candidates
from accumulation_harness.recipes.determinism import choose_device, deterministic
from accumulation_harness.system import accelerator

# Warnings of torch about its own prototypes and deprecations are none of ours: sync debug mode, the compiler, TF32.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not accelerator.is_available(), reason=f"needs a CUDA device: {accelerator.why_unavailable()}"),
]

ADAM = OptimizerConfig(name=OptimizerName.adam, lr=3e-3)
TEXT = WorkloadConfig(data=Data.text, model=Model.transformer)
RESNET = WorkloadConfig(model=Model.resnet18)


@contextmanager
def waits_told():
    """What torch warns of inside, waits for the device among it; no later test is warned, whatever is raised inside."""
    try:
        torch.cuda.set_sync_debug_mode("warn")  # warns that it is a prototype
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
def test_correct_accumulation_is_equivalent_on_cuda(changes, precision):
    settings = {"steps": 26, "algebra_steps": 26, **changes}
    config = TrialConfig(device=Device.cuda, precision=precision, optimizer=ADAM, accumulation_steps=(4,), **settings)
    for row in run_trial(config, lambda step, rows: None).arms:
        assert row["verdict"] == "equivalent", row["reasons"]


@pytest.mark.parametrize("precision", [Precision.float32, Precision.float16])
@pytest.mark.parametrize("execution", [Execution.compile, Execution.cuda_graph])
@pytest.mark.parametrize("split", list(Split))
def test_compiled_and_captured_arms_are_equivalent_to_an_eager_reference(execution, precision, split):
    """Unequal micro-batches are several graphs each; BatchNorm's buffers are written by them, and explained as ever."""
    shared: dict[str, Any] = {"device": Device.cuda, "precision": precision, "split": split, "accumulation_steps": (4,)}
    config = TrialConfig(**shared, execution=execution, optimizer=ADAM, steps=26, algebra_steps=26)
    for row in run_trial(config, lambda step, rows: None).arms:
        assert row["verdict"] == "equivalent", row["reasons"]
    config = TrialConfig(**shared, execution=execution, norm=Norm.batch, steps=5, algebra_steps=5)
    accumulated, null = run_trial(config, lambda step, rows: None).arms
    assert (accumulated["cause"], accumulated["explained"], null["verdict"]) == ("batch_statistics", True, "equivalent")


@pytest.mark.parametrize("execution", list(Execution))
@pytest.mark.parametrize(
    "changes",
    [{}, {"workload": TEXT, "norm": Norm.layer, "split": Split.ragged}, {"workload": RESNET, "norm": Norm.group}],
    ids=str,
)
def test_a_step_waits_for_the_device_once(changes, execution):
    """CUDA's sync debug mode warns at every wait: one for all arms of a step, where the table is read."""
    config = TrialConfig(device=Device.cuda, execution=execution, clip_norm=1.0, **changes)
    with deterministic():
        setting = Setting(config, choose_device(config.device))
        recipes = {REFERENCE: full_batch(config), **{one.label: one.recipe for one in standard_candidates(config)}}
        arms = setting.arms(recipes, steps=6, clip_norm=1.0)
        lock = LockStep(arms, config.seed)
        ids = next(setting.windows())
        for _ in range(2):  # the optimizer's state is made, models are compiled or captured
            lock.step(ids, gradients="compared")
        for _ in range(2):
            torch.cuda.synchronize()
            with waits_told() as caught:
                lock.step(ids, gradients="compared")
            waits = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
            assert len(waits) == 1, waits


def test_batch_norm_is_explained_on_cuda():
    config = TrialConfig(
        device=Device.cuda, workload=RESNET, norm=Norm.batch, optimizer=ADAM, accumulation_steps=(4,), steps=5, algebra_steps=5
    )
    accumulated, null = run_trial(config, lambda step, rows: None).arms
    assert (accumulated["verdict"], accumulated["cause"], accumulated["explained"]) == ("different", "batch_statistics", True)
    assert null["verdict"] == "equivalent"


def test_cpu_and_cuda_agree_in_float64():
    losses: dict[str, list[float]] = {}
    for device in (Device.cpu, Device.cuda):
        found = losses.setdefault(device, [])
        config = TrialConfig(device=device, precision=Precision.float64, steps=5, algebra_steps=1, accumulation_steps=(4,))
        run_trial(config, lambda step, rows, found=found: found.append(rows[1]["loss"]))  # type: ignore[misc]
    assert losses["cpu"] == pytest.approx(losses["cuda"], rel=1e-10)
