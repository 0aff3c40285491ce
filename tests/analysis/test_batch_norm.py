"""The tables of accuracy over b, on the trials that are kept, against numpy and scipy."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from accumulation_harness.experiments.batchnorm.answers import and_with_batch_norm, batch_norm_losses
from accumulation_harness.experiments.batchnorm.factors import factors
from accumulation_harness.experiments.batchnorm.tables import (
    against_full,
    between_norms,
    error_cells,
    fixed_batch,
    remedied,
    trained,
)
from tests.golden import kept_results

KEPT = kept_results().of("batchnorm")


def changed(rows):
    return replace(KEPT, measurements=rows)


def accuracies(study, arm, b, size=32, norm="batch"):
    rows = KEPT.study(study)
    rows = rows[(rows["model"] == "mlp") & (rows["effective_batch"] == size) & (rows["norm"] == norm)]
    own = rows[(rows["arm"] == arm) & (rows["micro_batch"] == b)]
    return 100 * own.drop_duplicates("seed").set_index("seed")["held_out_accuracy"].sort_index()


def test_costs_are_paired_with_the_full_batch_of_the_same_trial():
    rows = trained(KEPT, norm="batch")
    table = against_full(rows, 1.0)
    (row,) = table.query("model == 'mlp' and effective_batch == 32 and b == 4").to_dict("records")
    full, own = accuracies("convergence", "full", 32), accuracies("convergence", "accumulated", 4)
    test = stats.ttest_rel(full[own.index], own)
    interval = test.confidence_interval()
    assert (row["n"], row["accumulation_steps"], row["p"]) == (len(own), 8, pytest.approx(test.pvalue))
    assert (row["low"], row["mean"], row["high"]) == pytest.approx((interval.low, (full - own).mean(), interval.high))
    assert (table["p_holm"] >= table["p"]).all()


def test_a_training_that_two_grids_hold_counts_once():
    rows = trained(KEPT, norm="batch")
    twice = pd.concat([rows, rows.assign(trial=rows["trial"] + "-again")], ignore_index=True)
    for table in (lambda given: against_full(given, 1.0), error_cells):
        pd.testing.assert_frame_equal(table(twice), table(rows))


def test_advice_calls_a_b_costly_only_after_holm():
    """p = 0.04 alone, and not among all cells."""
    rows = KEPT.study("convergence").query("norm == 'batch' and model == 'mlp' and seed < 6")
    full = rows.query("arm == 'full'").set_index(["effective_batch", "seed"])["held_out_accuracy"]
    loses = 0.001 * np.array([1.0, 2.0, 3.0, 4.0, 5.0, -1.0])
    at = pd.MultiIndex.from_frame(rows[["effective_batch", "seed"]])
    off = np.where(rows["micro_batch"] == 2, 0.3, np.where(rows["micro_batch"] == 8, loses[rows["seed"]], 0.0))
    made = changed(rows.assign(held_out_accuracy=full[~full.index.duplicated()].reindex(at).to_numpy() - off))
    told = batch_norm_losses(made).set_index("b")
    assert told.loc[8, "low"] > 0 and not told.loc[8, "costs"] and told.loc[2, "costs"]
    advice = and_with_batch_norm(made)
    assert advice.action.startswith("Up to b = 2 it costs accuracy ")


def test_gains_are_paired_by_seed():
    rows = fixed_batch(trained(kept_results().of("groupnorm")))
    gains = between_norms(rows)
    own = rows[(rows["model"] == "mlp") & (rows["b"] == 2)].pivot_table(index="seed", columns="norm", values="error")
    (row,) = gains.query("model == 'mlp' and b == 2").to_dict("records")
    assert row["gain"] == pytest.approx((own["batch"] - own["group"]).mean()) and row["n"] == len(own)
    assert between_norms(rows[rows["norm"] == "batch"]).empty


def test_effects_of_b_and_n_are_those_of_a_least_squares_fit_of_the_2_x_2_design():
    cells = factors(KEPT)
    corners = {"full": (0, 0), "ghost_full_batch": (1, 0), "two_pass_statistics": (0, 1), "accumulated": (1, 1)}
    (row,) = cells.query("model == 'mlp' and effective_batch == 32 and b == 2").to_dict("records")
    own = {arm: accuracies("remedies", arm, 32 if arm == "full" else 2) for arm in corners}
    design = np.array([corners[arm] for arm, values in own.items() for _ in values], dtype=float)
    fitted = np.linalg.lstsq(
        np.c_[np.ones(len(design)), design - design.mean(axis=0)], -np.concatenate([*own.values()]), rcond=None
    )
    assert (row["of_b"].estimate, row["of_n"].estimate) == pytest.approx(tuple(fitted[0][1:])) and row["of_b"].estimate > 1
    less = KEPT.measurements.query("not (study == 'remedies' and arm == 'two_pass_statistics' and seed == 0)")
    assert set(factors(changed(less))["n"]) == {row["n"] - 1}, "a seed without all corners is left out"


@pytest.mark.parametrize("arm", ["two_pass_statistics", "recalibrated", "group_norm"])
def test_remedies_lose_to_the_large_batch_of_the_same_seed(arm):
    full = accuracies("remedies", "full", 32)
    rows = KEPT.study("remedies").query("model == 'mlp' and effective_batch == 32 and arm == 'accumulated' and micro_batch == 2")
    own = {
        "recalibrated": 100 * rows.set_index("seed")["recalibrated_held_out_accuracy"].sort_index(),
        "group_norm": accuracies("convergence", "accumulated", 2, norm="group"),
    }.get(arm, accuracies("remedies", arm, 2))
    found = (
        remedied(KEPT).query(f"model == 'mlp' and effective_batch == 32 and b == 2 and arm == '{arm}'").set_index("seed")["lost"]
    )
    pd.testing.assert_series_equal(found.sort_index(), (full - own).dropna(), check_names=False)
