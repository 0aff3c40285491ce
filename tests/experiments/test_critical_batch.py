"""The critical batch size of noisy quadratics in closed form: one grows as the loss falls, one does not."""

import math

import pytest

from accumulation_harness.experiments.critical_batch.answers import Growth, critical_batch

BATCHES = (4, 8, 16, 32, 64, 128, 256)
RATE, NOISE, SAMPLES = 0.02, 0.5, 256  # eta = RATE sqrt(B); variance of a sample's gradient (added), or its share of g^2


def expected_loss(loss, batch, *, is_added):
    """E of L = w^2 / 2 after `SAMPLES` samples of SGD.

    E w^2 <- (1 - eta)^2 E w^2 + eta^2 NOISE / B where the noise is added, and
    E w^2 <- ((1 - eta)^2 + eta^2 NOISE / B) E w^2 where it is in proportion to the gradient.
    """
    rate, steps = RATE * math.sqrt(batch), SAMPLES // batch
    kept, drawn = (1 - rate) ** 2, rate**2 * NOISE / batch
    if not is_added:
        return loss * (kept + drawn) ** steps
    rest = drawn / (1 - kept) / 2
    return rest + (loss - rest) * kept**steps


def critical(loss, *, is_added):
    return critical_batch([(batch, expected_loss(loss, batch, is_added=is_added)) for batch in BATCHES])


def test_it_grows_where_the_noise_is_added_and_stays_where_it_shrinks_with_the_gradient():
    added, shrinking = ([critical(loss, is_added=kind) for loss in (1.0, 0.004, 0.0026, 0.0001)] for kind in (True, False))
    assert added == sorted(added) and added[0] < 8 and added[-1] == 256, "noise is all there is at last: larger is better"
    assert added[1] < added[2]
    assert shrinking == pytest.approx([shrinking[0]] * 4) and shrinking[0] < 8


def test_where_the_tolerance_is_crossed():
    assert critical_batch([(4, 1.0), (8, 1.01), (16, 1.03)]) == pytest.approx(8 * math.sqrt(2))
    assert critical_batch([(4, 1.0), (8, math.nan), (16, 1.0)]) == 4
    assert critical_batch([(4, 1.0), (8, 0.5), (16, 1.0)]) == 16


def test_a_lower_bound_is_no_evidence_of_no_growth():
    key = ("digits", "none", "adam", 256)
    assert Growth(key, [0.01, -0.01] * 3, True, False).verdict == "does not grow"
    assert Growth(key, [0.01, -0.01] * 3, True, True).verdict == "undecided"
