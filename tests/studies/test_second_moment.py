"""Noise from per-sample gradients, and second moments of windows and of micro-batches, against numpy."""

import dataclasses

import numpy as np
import pytest
import torch

from accumulation_harness.config import Precision
from accumulation_harness.experiments.adam.second_moment import Noise, square_per_micro_batch
from accumulation_harness.measure.trial import accumulated
from accumulation_harness.recipes.recipe import take_step
from tests.studies.by_hand import trial

CONFIG = trial(
    "optimizer.name=adam optimizer.lr=0.01 optimizer.beta2=0.9 precision=float64 effective_batch=8 accumulation_steps=[4] steps=3"
)


@pytest.mark.parametrize("replaced", [True, False])
def test_expected_squares_of_batches(replaced):
    """E|g_b|^2 of all batches of 2 out of 4 scalars, with and without replacement, written out."""
    values = np.array([1.0, 2.0, 4.0, 9.0])
    if replaced:  # with replacement the variance is that of the population, D / (D - 1) smaller than the unbiased one
        noise = Noise(float(values.mean() ** 2), float(values.var()), 4)
        squares = [((a + b) / 2) ** 2 for a in values for b in values]
    else:
        noise = Noise(float(values.mean() ** 2), float(values.var(ddof=1)), 4)
        squares = [((values[i] + values[j]) / 2) ** 2 for i in range(4) for j in range(4) if i != j]
    assert noise.squared(2, replaced=replaced) == pytest.approx(np.mean(squares))
    assert noise.scale == pytest.approx(noise.trace / 16)


def test_micro_batch_squares_against_numpy(toy_setting, make_numpy):
    """Two windows of 4 x 2 samples at a learning rate of 0: v = sum of (1 - beta2) beta2^t x mean of g_k^2, N g_k the share."""
    setting = toy_setting(CONFIG)
    oracle = make_numpy(setting)
    recipe = square_per_micro_batch(accumulated(CONFIG, 4))
    still = dataclasses.replace(CONFIG.optimizer, lr=0.0)
    arm = setting.arm(recipe, precision=Precision.float64, optimizer=still)
    plain = setting.arm(accumulated(CONFIG, 4), precision=Precision.float64, optimizer=still)
    expected, whole = np.zeros(18), np.zeros(18)
    for ids in oracle.windows()[:2]:
        window = setting.exact.batch(torch.from_numpy(ids))
        take_step(arm, window)
        take_step(plain, window)
        terms = 1 + ids % 4
        chunks = np.split(np.arange(8), 4)
        shares = [4 * terms[c].sum() / terms.sum() * oracle.gradient(oracle.start, ids[c]) for c in chunks]
        expected = 0.9 * expected + 0.1 * np.mean(np.square(shares), axis=0)
        whole = 0.9 * whole + 0.1 * np.mean(shares, axis=0) ** 2

    def moment(of):
        return torch.cat([of.optimizer.state[p]["exp_avg_sq"].reshape(-1) for p in of.model.parameters()]).numpy()

    assert moment(arm) == pytest.approx(expected, rel=1e-10)
    assert moment(plain) == pytest.approx(whole, rel=1e-10)
    assert moment(arm).sum() > 1.2 * moment(plain).sum()
    assert all(
        torch.equal(arm.optimizer.state[p]["exp_avg"], plain.optimizer.state[q]["exp_avg"])
        for p, q in zip(arm.model.parameters(), plain.model.parameters(), strict=True)
    )
