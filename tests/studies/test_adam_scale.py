"""A missing 1/N against numpy's optimizers, and the settings under which it is the right gradient."""

import numpy as np
import pytest
import torch

from accumulation_harness.config import OUR_OPTIMIZERS, OptimizerConfig, OptimizerName
from accumulation_harness.experiments.adam import adam_scale
from accumulation_harness.experiments.adam.adam_scale import as_if_right, first_update
from tests.reference import adam, sgd
from tests.toy import Toy
from tests.trials import trial


class EqualTerms(Toy):
    """One loss term per sample: then the fault is a factor of N exactly."""

    def num_terms(self, batch):
        return torch.ones_like(batch.targets)


@pytest.fixture
def row_of(toy_setting):
    def row(*settings):
        config = trial("optimizer.lr=0.05 precision=float64 effective_batch=8 accumulation_steps=[4] steps=6", *settings)
        [found] = adam_scale.measurements(toy_setting(config, EqualTerms), lambda step, rows: None)
        return found

    return row


CASES = [
    "optimizer.name=sgd",
    "optimizer.name=sgd optimizer.weight_decay=0.3",
    "optimizer.name=momentum optimizer.weight_decay=0.3",
    "optimizer.name=nesterov",
    "optimizer.name=adam optimizer.eps=0.1",
    "optimizer.name=adam optimizer.weight_decay=0.3",
    "optimizer.name=adamw optimizer.weight_decay=0.3 optimizer.eps=0.1",
    "optimizer.name=sgd clip_norm=0.05",
    "optimizer.name=adam optimizer.eps=0.1 clip_norm=0.9",
]


@pytest.mark.parametrize("settings", CASES)
def test_the_fault_is_the_right_gradient_under_other_settings(row_of, settings):
    """N = 4 is a power of two: without clipping, whose norm is softened by 1e-6, bit for bit."""
    row = row_of(settings)
    assert row["right_error"] < 1e-13
    assert row["as_if_error"] == 0 if "clip_norm" not in settings else 0 < row["as_if_error"] < 1e-4
    assert row["fault_error_first"] == pytest.approx(row["predicted_first"], rel=1e-9)
    if "clip_norm=0.05" not in settings:  # always active: the factor is gone
        assert row["fault_error"] > 1e-2
    else:
        assert row["clipped_share"] == 1 and row["fault_error"] < 1e-3


@pytest.mark.parametrize("changed", ["eps", "weight_decay"])
def test_other_settings_are_not_the_fault(row_of, monkeypatch, changed):
    """The comparison sees a setting that was not carried over."""

    def left_as_it_is(optimizer, clip_norm, num):
        carried, clip = as_if_right(optimizer, clip_norm, num)
        return OptimizerConfig(**{**vars(carried), changed: getattr(optimizer, changed)}), clip

    monkeypatch.setattr(adam_scale, "as_if_right", left_as_it_is)
    assert row_of("optimizer.name=adam optimizer.eps=0.01 optimizer.weight_decay=0.3")["as_if_error"] > 1e-3


@pytest.mark.parametrize("name", OUR_OPTIMIZERS)
def test_first_update_against_the_reference(name):
    rng = np.random.default_rng(3)
    gradient, weights = rng.normal(0, 1, 7), rng.normal(0, 1, 7)
    optimizer = OptimizerConfig(name=name, lr=0.1, weight_decay=0.2, eps=0.05)
    decayed = gradient + 0.2 * weights
    match name:
        case OptimizerName.adam:
            after = adam(weights, [decayed], 0.1, 0.9, 0.999, 0.05)
        case OptimizerName.adamw:
            after = adam(weights, [gradient], 0.1, 0.9, 0.999, 0.05, decay=0.2)
        case _:
            after = sgd(weights, [decayed], 0.1, 0.0 if name == OptimizerName.sgd else 0.9, name == OptimizerName.nesterov)
    update = first_update(optimizer, torch.from_numpy(gradient), torch.from_numpy(weights)).numpy()
    assert weights - 0.1 * update == pytest.approx(after, rel=1e-12)
