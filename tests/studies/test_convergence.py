from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from accumulation_harness.config import Model, Norm, OptimizerConfig, OptimizerName, Precision, TrialConfig, WorkloadConfig
from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.experiments.shared import convergence
from accumulation_harness.measure import studies
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.trial import Candidate, full_batch
from accumulation_harness.recipes.determinism import choose_device
from accumulation_harness.recipes.micro_batch import windows

# 33 steps of 47: an epoch of 1,500 ends in a short window of 43, which 4 micro-batches of 12 cut unevenly.
CONFIG = TrialConfig(
    study="convergence", effective_batch=48, accumulation_steps=(4,), steps=33, precision=Precision.float64,
    optimizer=OptimizerConfig(name=OptimizerName.momentum, lr=0.05), norm=Norm.group, seed=3,
)  # fmt: skip
SAME = 1e-10  # relative, of losses after 33 float64 steps whose gradients agree to 1e-15


def run(config: TrialConfig) -> tuple[dict[str, studies.Row], list[list[studies.Row]]]:
    """Measurements by arm, and the step rows."""
    steps: list[list[studies.Row]] = []
    record = studies.run(config, lambda step, rows: steps.append(rows))
    assert record["arms"] == [] and record["seconds"]["convergence"] > 0
    return {str(ArmName(row["arm"], row["accumulation_steps"])): row for row in record["measurements"]}, steps


def by_hand(config: TrialConfig) -> tuple[list[float], float, float]:
    """Losses, held-out loss and accuracy of the loop everyone writes, on the full batch."""
    setting = Setting(config, choose_device(config.device))
    model, data, losses = setting.initial.double(), setting.exact, []
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer.lr, momentum=config.optimizer.momentum)
    stream = windows(data.num_samples, config.effective_batch, config.seed, config.data.last_window)
    for ids in itertools.islice(stream, config.steps):
        batch = data.batch(ids)
        loss = F.cross_entropy(model(batch.inputs), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        outputs = model.eval()(data.held_out.inputs)
    correct = (outputs.argmax(1) == data.held_out.targets).double().mean()
    return losses, float(F.cross_entropy(outputs, data.held_out.targets)), float(correct)


def test_arms_end_where_the_loop_everyone_writes_ends() -> None:
    arms, steps = run(CONFIG)
    losses, held_out, accuracy = by_hand(CONFIG)
    assert set(arms) == {"full-1", "accumulated-4", "permuted-1"}
    for name, arm in arms.items():
        own = [row["loss"] for rows in steps for row in rows if str(ArmName(row["arm"], row["accumulation_steps"])) == name]
        assert own == pytest.approx(losses, rel=SAME)
        assert arm["held_out_loss"] == pytest.approx(held_out, rel=SAME) and arm["held_out_accuracy"] == accuracy
        assert arm["samples"] == steps[-1][0]["samples"] == 1500 + 48
    assert [row["samples"] for row in steps[31]] == [1500] * 3, "the 32nd window is the epoch's remainder of 12"


def test_batch_norm_ends_elsewhere() -> None:
    arms, _ = run(dataclasses.replace(CONFIG, norm=Norm.batch))
    full = arms["full-1"]["held_out_loss"]
    assert arms["permuted-1"]["held_out_loss"] == pytest.approx(full, rel=SAME)
    assert not math.isclose(arms["accumulated-4"]["held_out_loss"], full, rel_tol=1e-4)


def test_faults_are_arms_too() -> None:
    arms, _ = run(dataclasses.replace(CONFIG, faults=("loss_not_divided",), steps=3))
    assert arms["loss_not_divided-4"]["final_loss"] != arms["accumulated-4"]["final_loss"]


def test_recalibrated_statistics_against_those_taken_by_hand() -> None:
    """Those of the training set are of no batch, and do not move the weights."""
    config = dataclasses.replace(CONFIG, norm=Norm.batch, steps=3)
    arms, _ = run(config)
    assert "recalibrated_held_out_loss" not in run(dataclasses.replace(CONFIG, steps=2))[0]["full-1"]
    setting = Setting(config, choose_device(config.device))
    (end,) = convergence.train(setting, [Candidate("full", full_batch(config))], lambda *_: None)
    model, data = end.arm.model, setting.exact
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    seen: dict[torch.nn.Module, torch.Tensor] = {}
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, inputs: seen.__setitem__(layer, inputs[0].detach()))
    before = [p.clone() for p in model.parameters()]
    with torch.no_grad():
        model.train()(data.batch(torch.arange(data.num_samples)).inputs)
        for layer in layers:
            layer.running_mean, layer.running_var = seen[layer].mean((0, 2, 3)), seen[layer].var((0, 2, 3))
        loss = float(F.cross_entropy(model.eval()(data.held_out.inputs), data.held_out.targets))
    assert all(map(torch.equal, before, model.parameters()))
    assert arms["full-1"]["recalibrated_held_out_loss"] == pytest.approx(loss, rel=1e-10)
    assert arms["full-1"]["held_out_loss"] != pytest.approx(loss, rel=1e-3), "after three steps the running ones lag behind"


@pytest.mark.parametrize("model, of_a_sample", [(Model.conv, 16), (Model.mlp, 1)])
def test_values_per_channel_are_those_of_the_layer_that_has_the_fewest(model: Model, of_a_sample: int) -> None:
    """Convolutions of 8 x 8 pixels, then of 4 x 4; of a perceptron one value of a sample for each unit."""
    config = dataclasses.replace(CONFIG, norm=Norm.batch, steps=2, workload=WorkloadConfig(model=model))
    arms, _ = run(config)
    assert {name: arm["values_per_channel"] for name, arm in arms.items()} == {
        name: of_a_sample * arm["micro_batch"] for name, arm in arms.items()
    }
    assert arms["accumulated-4"]["values_per_channel"] == of_a_sample * 12
