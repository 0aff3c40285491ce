"""The balance loss against numpy, its covariance formula, and the two remedies."""

import numpy as np
import pytest
import torch

from accumulation_harness.experiments.balance_loss import balance_loss
from accumulation_harness.experiments.balance_loss.balance_loss import (
    Mixture,
    buffered,
    flat,
    own,
    window_balance,
)
from accumulation_harness.measure.lock_step import Setting
from tests.studies.by_hand import trial

CONFIG = trial("study=balance_loss precision=float64 effective_batch=64 accumulation_steps=[4] steps=5 data.last_window=drop")


@pytest.fixture(scope="module")
def setting():
    return Setting(CONFIG, torch.device("cpu"))


def numpy_loss(x, router, chunks):
    """Mean of the micro-batches' losses, with their shares and mean probabilities [N, E]."""
    scores = x @ router.T
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    f = np.eye(8)[p.argmax(1)]
    shares, means = (np.stack([part.mean(0) for part in np.split(values, chunks)]) for values in (f, p))
    return float(8 * (shares * means).sum(1).mean()), shares, means


def test_the_loss_and_its_formula_against_numpy(setting):
    batch = setting.exact.batch(next(setting.windows()))
    mixture = Mixture(setting, 64)
    x, router = flat(batch).numpy(), mixture.router.detach().numpy()
    per_micro_batch, shares, means = numpy_loss(x, router, 4)
    whole = numpy_loss(x, router, 1)[0]
    row = balance_loss.at_once(mixture, batch, 4, own)
    assert row["loss"] == pytest.approx(per_micro_batch, rel=1e-13) and row["window_loss"] == pytest.approx(whole, rel=1e-13)
    covariance = sum(np.cov(shares[:, e], means[:, e], ddof=0)[0, 1] for e in range(8)) * 8
    assert row["covariance"] == pytest.approx(covariance, rel=1e-10)
    assert row["loss"] - row["window_loss"] == pytest.approx(covariance, abs=1e-14) and covariance > 1e-4
    so_far = np.cumsum(shares, 0) / np.arange(1, 5)[:, None]
    assert float(window_balance(mixture, batch, 4, buffered)[0].detach()) == pytest.approx(8 * (so_far * means).sum(1).mean())


def test_two_passes_give_the_windows_gradient_and_the_others_do_not(setting):
    rows = {(row["arm"], row["accumulation_steps"]): row for row in balance_loss.measurements(setting, lambda t, r: None)}
    assert rows["two_passes", 4]["gradient_error"] < 1e-13 < 1e-3 < rows["per_micro_batch", 4]["gradient_error"]
    assert rows["buffered_counts", 4]["gradient_error"] > 1e-3
    full, exact, other = (rows[key]["held_out_loss"] for key in (("full", 1), ("two_passes", 4), ("per_micro_batch", 4)))
    assert exact == pytest.approx(full, rel=1e-10) and other != pytest.approx(full, rel=1e-8)
