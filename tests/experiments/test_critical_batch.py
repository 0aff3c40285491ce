"""The critical batch size of noisy quadratics in closed form: one grows as the loss falls, one does not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.experiments.critical_batch.answers import Growth, advice, critical_batch, critical_batches, growths

BATCHES = (4, 8, 16, 32, 64, 128, 256)
RATE, NOISE, SAMPLES = 0.02, 0.5, 256  # eta = RATE sqrt(B); variance of a sample's gradient (added), or its share of g^2


def expected_loss(loss: float, batch: int, *, is_added: bool) -> float:
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


def critical(loss: float, *, is_added: bool) -> float:
    return critical_batch([(batch, expected_loss(loss, batch, is_added=is_added)) for batch in BATCHES])


def test_it_grows_where_the_noise_is_added_and_stays_where_it_shrinks_with_the_gradient() -> None:
    added, shrinking = ([critical(loss, is_added=kind) for loss in (1.0, 0.004, 0.0026, 0.0001)] for kind in (True, False))
    assert added == sorted(added) and added[0] < 8 and added[-1] == 256, "noise is all there is at last: larger is better"
    assert added[1] < added[2]
    assert shrinking == pytest.approx([shrinking[0]] * 4) and shrinking[0] < 8


def test_where_the_tolerance_is_crossed() -> None:
    assert critical_batch([(4, 1.0), (8, 1.01), (16, 1.03)]) == pytest.approx(8 * math.sqrt(2))
    assert critical_batch([(4, 1.0), (8, math.nan), (16, 1.0)]) == 4
    assert critical_batch([(4, 1.0), (8, 0.5), (16, 1.0)]) == 16


def results(octaves: float, *, seeds: int = 6, spread: float = 0.1, best: float = 0.02) -> load.Results:
    """Losses after branches whose critical batch is 16 at first and `octaves` more at the last of two points."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for seed in (*range(seeds), 100):
        for lr in (0.01, 0.02, 0.04):
            for point in (0, 1):
                middle = 4 + octaves * point + spread * rng.standard_normal()
                branches = [
                    {"trial": f"{seed}-{lr}", "study": "critical_batch", "workload": "digits", "norm": "none",
                     "optimizer": "adam", "steps": 120,
                     "effective_batch": 256, "lr": lr, "seed": seed, "batch": batch, "point": point, "samples": 1000 * point,
                     "branch_samples": 1000, "start_loss": 1.0, "trunk_end": abs(math.log(lr / best)),
                     "validation_loss": 1 + 0.02 * (math.log2(batch) - 2) / max(0.3, middle - 2)}
                    for batch in BATCHES
                ]  # fmt: skip
                rows += branches if seed < 100 else [branches[0] | dict.fromkeys(("batch", "point", "validation_loss"))]
    empty = pd.DataFrame(columns=["experiment", "trial"])
    return load.Results(empty, pd.DataFrame(rows), empty, ())


def test_shorter_trainings_of_the_same_store_are_others() -> None:
    long, quick = (results(octaves).measurements.assign(steps=steps) for octaves, steps in ((2, 120), (-2, 30)))
    empty = pd.DataFrame(columns=["experiment", "trial"])
    both = load.Results(empty, pd.concat([quick, long], ignore_index=True), empty, ())
    pd.testing.assert_frame_equal(critical_batches(both), critical_batches(results(2)))


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (results(2), "grows"),
        (results(-2), "shrinks"),
        (results(0), "does not grow"),
        (results(0, spread=1.0), "undecided"),
        (results(2, seeds=4), "undecided"),
        (results(2, best=0.04), "undecided"),
    ],
    ids=["planted", "the reverse", "nothing", "noise", "four seeds", "a rate at an end"],
)
def test_what_is_decided(given: load.Results, verdict: str) -> None:
    (found,) = growths(critical_batches(given))
    assert found.verdict == verdict
    assert ("begin with a small batch" in advice([found, found])) is (verdict == "grows")
    assert ("one batch size" in advice([found, found])) is (verdict == "does not grow")
    assert "none follows" in advice([found])


def test_a_lower_bound_is_no_evidence_of_no_growth() -> None:
    key = ("digits", "none", "adam", 256)
    assert Growth(key, [0.01, -0.01] * 3, True, False).verdict == "does not grow"
    assert Growth(key, [0.01, -0.01] * 3, True, True).verdict == "undecided"
