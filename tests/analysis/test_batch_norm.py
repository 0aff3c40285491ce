"""The tables of accuracy over b, on rows made by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from accumulation_harness.analysis.load import Results
from accumulation_harness.experiments.batchnorm.answers import and_with_batch_norm, batch_norm_losses
from accumulation_harness.experiments.batchnorm.tables import (
    against_full,
    between_norms,
    error_cells,
    fixed_batch,
    trained,
)
from tests.experiments.accuracy_rows import BATCH, LARGE, SEEDS, results, run_of, two_batches


def test_costs_are_paired_with_the_full_batch_of_the_same_trial() -> None:
    rows = trained(two_batches(BATCH, LARGE))
    table = against_full(rows, 1.0)
    row = table[(table["effective_batch"] == 128) & (table["b"] == 4)].iloc[0]
    pairs = [run_of("batch", LARGE, 128, seed) for seed in SEEDS]
    error = {(seed, one["micro_batch"]): 100 * (1 - one["held_out_accuracy"]) for seed in SEEDS for one in pairs[seed][:-1]}
    differences = np.array([error[seed, 4] - error[seed, 128] for seed in SEEDS])
    test = stats.ttest_rel([error[seed, 4] for seed in SEEDS], [error[seed, 128] for seed in SEEDS])
    interval = test.confidence_interval()
    assert (row["n"], row["accumulation_steps"]) == (6, 32)
    assert row["mean"] == pytest.approx(differences.mean()) and row["p"] == pytest.approx(test.pvalue)
    assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
    assert row["apart"] > 1e3 and row["apart_p"] < 0.01 and (table["p_holm"] >= table["p"]).all(), (
        "the permuted full batch moves the loss by 1e-6"
    )
    assert len(table) == 8 and len(error_cells(rows)) == 10


def test_a_training_that_two_grids_hold_counts_once() -> None:
    rows = trained(two_batches(BATCH, LARGE))
    twice = pd.concat([rows, rows.assign(trial=rows["trial"] + "-again")], ignore_index=True)
    for table in (lambda given: against_full(given, 1.0), error_cells):
        pd.testing.assert_frame_equal(table(twice), table(rows))


def test_advice_calls_a_b_costly_only_after_holm() -> None:
    many = dict.fromkeys((32, 16, 8, 4), 3.0) | {2: 30.0}
    made = two_batches(many, {128: 3.0} | {b: error for b, error in many.items() if b < 32})
    rows = made.measurements
    chosen = (rows["effective_batch"] == 128) & (rows["micro_batch"] == 8)
    full = rows[(rows["effective_batch"] == 128) & (rows["arm"] == "full")].set_index("seed")["held_out_accuracy"]
    lost = 0.001 * np.array([1.0, 2.0, 3.0, 4.0, 5.0, -1.0])  # p = 0.04 alone, and not among eight
    rows.loc[chosen, "held_out_accuracy"] = [full[seed] - lost[seed] for seed in rows.loc[chosen, "seed"]]
    empty = pd.DataFrame({"experiment": []})
    made = Results(empty, rows, empty, ())
    told = batch_norm_losses(made).set_index("b")
    assert told.loc[8, "low"] > 0 and not told.loc[8, "costs"] and told.loc[2, "costs"]
    advice = and_with_batch_norm(made)
    assert advice is not None and advice.action.startswith("It costs accuracy up to b = 2 ")


def test_what_is_lost_in_the_weights_alone() -> None:
    """Planted: with the training set's statistics b = 4 loses two points and all else nothing."""
    rows = trained(two_batches(BATCH, LARGE))
    assert against_full(rows, 1.0)["weights"].map(len).sum() == 0, "not measured"
    again = rows.assign(recalibrated_held_out_accuracy=np.where(rows["b"] == 4, 0.95, 0.97))
    for row in against_full(again, 1.0).itertuples():
        assert row.weights == pytest.approx([2.0 if row.b == 4 else 0.0] * 6)


def test_gains_are_paired_by_seed() -> None:
    gains = between_norms(fixed_batch(trained(results()))).set_index("b")
    assert gains.loc[2, "gain"] == pytest.approx(26, abs=0.5) and gains.loc[32, "gain"] == pytest.approx(-1, abs=0.5)
    assert gains.loc[2, "low"] < gains.loc[2, "gain"] < gains.loc[2, "high"] and set(gains["n"]) == {6}
    only = trained(results())
    assert between_norms(only[only["norm"] == "batch"]).empty
