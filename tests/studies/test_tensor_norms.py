from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from accumulation_harness.config import Norm, TrialConfig
from accumulation_harness.measure import studies
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.recipes.determinism import choose_device
from accumulation_harness.recipes.micro_batch import windows

CONFIG = TrialConfig(study="tensor_norms", effective_batch=24, accumulation_steps=(3, 12), steps=3, probe_every=2, seed=6)


def measure(config: TrialConfig) -> list[studies.Row]:
    rows: list[studies.Row] = studies.run(config, lambda step, rows: None)["measurements"]
    return rows


def test_norms_are_those_of_autograd() -> None:
    setting = Setting(CONFIG, choose_device(CONFIG.device))
    model, data = setting.initial.double(), setting.exact
    batch = data.batch(next(windows(data.num_samples, 24, CONFIG.seed, CONFIG.data.last_window)))
    gradients = torch.autograd.grad(F.cross_entropy(model(batch.inputs), batch.targets), list(model.parameters()))
    expected = {name: float(g.norm()) for (name, _), g in zip(model.named_parameters(), gradients, strict=True)}
    rows = measure(CONFIG)
    assert {(row["step"], row["accumulation_steps"]) for row in rows} == {(0, 3), (0, 12), (2, 3), (2, 12)}
    for row in (row for row in rows if row["step"] == 0):
        assert row["full_norm"] == pytest.approx(expected[row["tensor"]], rel=1e-12)
    assert all(math.isclose(row["accumulated_norm"], row["full_norm"], rel_tol=1e-12) for row in rows)


def test_batch_norm_changes_them() -> None:
    rows = [row for row in measure(dataclasses.replace(CONFIG, norm=Norm.batch)) if row["full_norm"] > 1e-6]
    assert max(abs(row["accumulated_norm"] / row["full_norm"] - 1) for row in rows if row["accumulation_steps"] == 12) > 0.05
