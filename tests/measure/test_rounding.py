"""L1 against numpy in float64: gradients with planted errors, what is made of them, and which of them the verdict rejects."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu

from accumulation_harness.config import Precision
from accumulation_harness.judge.sequential import spent
from accumulation_harness.judge.verdict import rounding_failures
from accumulation_harness.measure import rounding
from accumulation_harness.measure.lock_step import REFERENCE
from accumulation_harness.measure.trial import accumulated
from tests.toy_setting import Numpy
from tests.trials import trial

K = 30  # permutations, the fewest that a configuration may have
IDS = torch.tensor([7, 0, 22, 13, 4, 9, 18, 2])
CONFIG = trial("effective_batch=8 accumulation_steps=[4] seed=11 optimizer.lr=0.5")


def directions(gradient):
    """The gradient, and a vector of its length that is orthogonal to it."""
    other = np.random.default_rng(0).normal(size=gradient.shape)
    other -= gradient * (other @ gradient) / (gradient @ gradient)
    return gradient, other * np.linalg.norm(gradient) / np.linalg.norm(other)


def planted(recipe, gradients):
    """The recipe, but the optimizer finds `gradients[t]` in window t, rounded to the format of the parameters."""

    def plant(arm):
        parameters = list(arm.model.parameters())
        pieces = torch.from_numpy(gradients[arm.windows]).split([p.numel() for p in parameters])
        for p, piece in zip(parameters, pieces, strict=True):
            p.grad = piece.view_as(p).to(p.dtype) * arm.scaler.get_scale()

    return dataclasses.replace(recipe, at_boundary=(plant, *recipe.at_boundary))


FULL, ARM = accumulated(CONFIG, 1), accumulated(CONFIG, 4)


def errors_of(gradients, exact):
    """Relative distances of gradients rounded to float32."""
    return np.array([np.linalg.norm(g.astype(np.float32) - exact) / np.linalg.norm(exact) for g in gradients])


def with_errors(exact, sizes):
    """The exact gradient moved by the relative `sizes`, at a right angle, so that its scale stays 1 to second order."""
    along, across = directions(exact)
    return [along + size * across for size in sizes]


def measured(setting, full, arm):
    return rounding.measure(setting, {REFERENCE: planted(FULL, full), "arm": planted(ARM, arm)}, IDS)["arm"]


def test_error_ratio_interval_and_rank_against_numpy(toy_setting):
    """Window 0 is the natural order, the other K are permutations; each has an error of its own."""
    setting = toy_setting(CONFIG)
    exact = Numpy(setting).gradient(Numpy(setting).start, IDS.numpy())
    rng = np.random.default_rng(5)
    full, arm = (with_errors(exact, rng.uniform(0.5, 1.5, K + 1) * size) for size in (1e-3, 1.7e-3))
    found = measured(setting, full, arm)
    k = found.permutations
    fulls, arms = errors_of(full, exact)[: 1 + k], errors_of(arm, exact)[: 1 + k]
    top, bottom = np.median(arms[1:]), np.median(fulls[1:])
    assert (found.full_error, found.arm_error) == pytest.approx((bottom, top), rel=1e-9)
    assert found.ratio == pytest.approx(top / bottom, rel=1e-9)
    alpha = spent(k, K)
    assert found.low < found.ratio < found.high

    def p_value(ratio, side):
        return float(mannwhitneyu(arms[1:] / ratio, fulls[1:], alternative=side, method="exact").pvalue)

    assert p_value(found.high * (1 + 1e-9), "less") <= alpha < p_value(found.high * (1 - 1e-9), "less")
    assert p_value(found.low * (1 - 1e-9), "greater") <= alpha < p_value(found.low * (1 + 1e-9), "greater")
    assert (found.skipped, found.zeros, found.full_zeros) == (0, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "tried", "rejected"), [((), 1, False), ((0,), 2, False), ((0, 1), 3, False), ((0, 1, 2), 3, True)]
)
def test_a_rejection_counts_when_every_window_confirms_it(toy_setting, wrong, tried, rejected):
    """An error a hundred times the rounding in the windows `wrong`; the arm that is not judged is measured once."""
    setting = toy_setting(CONFIG)
    stream = list(setting.windows(3))
    bad = [frozenset(stream[k].tolist()) for k in wrong]

    def spoil(arm):
        if frozenset(torch.cat(arm.seen).tolist()) in bad:
            for p in arm.model.parameters():
                p.grad.mul_(1 + 1e-4)

    spoilt = dataclasses.replace(ARM, at_boundary=(spoil, *ARM.at_boundary))
    recipes = {REFERENCE: FULL, "arm": spoilt, "aside": spoilt}
    measured_in = [
        lambda labels, ids=ids: rounding.measure(setting, {k: v for k, v in recipes.items() if k in {REFERENCE, *labels}}, ids)
        for ids in stream
    ]
    found = rounding.confirmed(measured_in[0](recipes), ["arm"], Precision.float32, measured_in[1:])
    assert (found["arm"].windows, found["aside"].windows) == (tried, 1)
    assert bool(rounding_failures(Precision.float32, found["arm"])) == rejected
    assert bool(rounding_failures(Precision.float32, found["aside"])) == (0 in wrong)
