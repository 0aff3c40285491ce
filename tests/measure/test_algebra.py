"""L0 where gradients cancel and where rounding is amplified: right arms are right, and a wrong window is found."""

import dataclasses

import numpy as np
import pytest
import torch

from accumulation_harness.judge.gates import ALGEBRA_GATE, TRAJECTORY_GATE
from accumulation_harness.judge.verdict import algebra_failures
from accumulation_harness.measure.algebra import measure
from accumulation_harness.measure.lock_step import REFERENCE
from accumulation_harness.measure.trial import accumulated, permuted, reference
from accumulation_harness.recipes import catalogue
from tests.toy_setting import Numpy
from tests.trials import setting_of, trial

# Windows of 10, 10 and 4 of the 24 samples, twice.
CONFIG = trial("effective_batch=10 accumulation_steps=[2] steps=6 optimizer.lr=0.3 split=ragged")
FLOOR, WRONG = "floor", "wrong"


def scaled(factor):
    """The accumulated gradient of each window times `factor` of its number, just before the step."""

    def scale(arm):
        for parameter in arm.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor(arm.windows))

    return lambda recipe: dataclasses.replace(recipe, at_boundary=(scale, *recipe.at_boundary))


def algebra(setting, change=lambda recipe: recipe):
    config = setting.config
    recipes = {REFERENCE: reference(config), FLOOR: permuted(config, 0), WRONG: change(accumulated(config, 2))}
    return measure(setting, recipes, list(setting.windows()), FLOOR)[WRONG]


def test_where_gradients_cancel_an_arm_is_compared_as_far_as_the_referee_resolves(toy_setting):
    """Near the optimum of the whole data, where 24 gradients of size 1 sum to one of size 1e-7, no right arm reaches 1e-12."""
    config = trial("effective_batch=24 optimizer.lr=1e-9", base=CONFIG)
    setting = toy_setting(config)
    numbers = Numpy(setting)
    ids, theta = np.arange(24), numbers.start
    while np.linalg.norm(numbers.gradient(theta, ids)) > 1e-7:
        theta = theta - numbers.gradient(theta, ids)
    with torch.no_grad():
        pieces = torch.from_numpy(theta).split([p.numel() for p in setting.initial.parameters()])
        for parameter, piece in zip(setting.initial.parameters(), pieces, strict=True):
            parameter.data = piece.view_as(parameter).double()
    right, wrong = algebra(setting).signature, algebra(setting, scaled(lambda _: 1 + 1e-3)).signature
    assert 1e-11 < right.resolution < 1e-7 and right.gradient_error <= ALGEBRA_GATE and right.is_exact
    assert wrong.gradient_error == pytest.approx(1e-3, rel=1e-3) and not wrong.is_exact
    elsewhere = algebra(toy_setting(config)).signature
    assert elsewhere.resolution == 0.0 and elsewhere.is_exact  # where nothing cancels the gate is enough


@pytest.mark.slow
def test_where_rounding_is_amplified_a_right_arm_is_right_and_a_wrong_window_is_found():
    """Adam with lr = 2 throws a transformer about: shuffled rows part it from the full batch within ten steps."""
    config = trial(
        "workload.data=text workload.model=transformer workload.width=4 norm=layer effective_batch=6 accumulation_steps=[2]",
        "split=ragged optimizer.name=adam optimizer.lr=2 optimizer.beta2=0.4 optimizer.eps=1e-10 probe_every=50",
    )
    setting, right = setting_of(config), accumulated(config, 2)
    recipes = {
        REFERENCE: reference(config),
        FLOOR: permuted(config, 0),
        "right": right,
        WRONG: scaled(lambda window: 1 + 1e-3 * (window == 28))(right),
    }
    results = measure(setting, recipes, list(setting.windows(30)), FLOOR)
    for label in (FLOOR, "right"):
        found = results[label].algebra
        assert found.parted_at < 25, label
        assert found.trajectory_error <= TRAJECTORY_GATE and not algebra_failures(found)
        assert results[label].signature.probes > 30 - found.parted_at  # every window since
    found = results[WRONG].algebra  # no probe of the first run sees it, nor could the trajectory tell
    assert found.gradient_error == pytest.approx(1e-3, rel=1e-6) and found.parted_at is None and algebra_failures(found)


@pytest.mark.parametrize("fault", ["cached_weights_stale", "gradients_not_cleared", "samples_repeated"])
def test_a_large_arm_that_is_wrong_is_looked_at_again(toy_setting, monkeypatch, fault):
    """Of which nothing earlier was kept, since it was as right as the others: what is said of it is the same to the bit."""
    setting = toy_setting(CONFIG)
    change = catalogue.named(fault, CONFIG.precision)
    kept = algebra(setting, change)
    monkeypatch.setattr("accumulation_harness.measure.algebra.REMEMBERED_BYTES", 0)
    assert repr(algebra(setting, change)) == repr(kept) and kept.signature.gradient_error > ALGEBRA_GATE
