"""Quantities of learning curves against independent oracles, and rules that find what is planted and nothing else."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.config import TUNING_SEEDS
from accumulation_harness.experiments.convergence import trainings as convergence
from accumulation_harness.experiments.convergence.trainings import drift, reach, roughness
from tests.golden import kept_results

SAMPLES = [float(i) for i in range(0, 1010, 10)]


def test_a_target_is_reached_where_the_closed_form_says():
    loss = [2.0 - 0.0015 * s for s in SAMPLES]
    assert reach(SAMPLES, loss, 1.4) == pytest.approx(400.0)
    assert reach(SAMPLES, loss, 5.0) == 0.0
    assert reach(SAMPLES, loss, 0.3) == reach(SAMPLES, [math.nan] * len(SAMPLES), 1.0) == math.inf


def test_drift():
    loss = [math.exp(-s / 300) for s in SAMPLES]
    assert abs(drift([1.0] * 50)) < convergence.FLAT < abs(drift(loss))
    assert drift([3.0] * 40 + [2.0] * 5 + [1.0] * 5) == pytest.approx(-0.5)


def test_roughness_is_the_deviation_of_white_noise_and_blind_to_a_steady_decay():
    noise = np.random.default_rng(0).normal(0, 0.03, 20_000)
    assert roughness(np.exp(noise).tolist()) == pytest.approx(0.03, rel=0.03)
    assert roughness(np.exp(noise - np.linspace(0, 9, 20_000)).tolist()) == pytest.approx(0.03, rel=0.03)
    assert roughness(np.exp(-np.linspace(0, 9, 50)).tolist()) == pytest.approx(0, abs=1e-12)
    assert roughness([1e6, 1.0, *[1.0] * 18]) == 0, "the first tenth is not looked at"


def test_what_computes_the_full_batch_has_its_rate_and_judging_seeds_have_no_say():
    rows = convergence.trainings(kept_results().of("convergence"))
    liar = (rows["seed"] < TUNING_SEEDS) | rows["arm"].isin(("permuted", "accumulated"))
    lied = rows.assign(validation_loss=rows["validation_loss"].where(~liar, -rows["lr"]))
    for table in (convergence.tuned, convergence.judged):
        pd.testing.assert_frame_equal(table(lied).drop(columns="validation_loss", errors="ignore"),
                                      table(rows).drop(columns="validation_loss", errors="ignore"))  # fmt: skip
    best = convergence.tuned(rows).set_index(["workload", "norm", "arm", "accumulation_steps"])["lr"]
    losses = rows[(rows["seed"] >= TUNING_SEEDS) & (rows["workload"] == "python_bytes") & (rows["arm"] == "full")]
    assert best["python_bytes", "layer", "full", 1] == losses.groupby("lr")["validation_loss"].mean().idxmin()
    assert convergence.judged(rows[rows["seed"] < TUNING_SEEDS]).empty
    (levels,) = convergence.targets(rows[rows["workload"] == "python_bytes"]).values()
    curves = losses[losses["lr"] == best["python_bytes", "layer", "full", 1]]["curve_probe_loss"]
    start, end = (np.mean([curve[at] for curve in curves]) for at in (0, -1))
    assert levels == pytest.approx([start - share * (start - end) for share in (0.5, 0.8, 0.95)])


def test_a_training_that_is_stored_twice_is_one_and_a_shorter_one_is_another():
    kept = kept_results().of("convergence")
    once = kept.measurements
    for other in (once, once.assign(steps=3)):
        twice = pd.concat([once, other.assign(trial=other["trial"] + "-again")], ignore_index=True)
        pd.testing.assert_frame_equal(convergence.trainings(replace(kept, measurements=twice)), convergence.trainings(kept))


def test_a_rate_that_nothing_had_to_choose_is_judged_as_it_is():
    """Of trials at one rate, without tuning seeds; where there are several rates and no such seeds, nothing is judged."""
    rows = convergence.trainings(kept_results().of("convergence"))
    of_one = rows.query("workload == 'mnist1d' and norm == 'group' and optimizer == 'momentum' and seed < 100")
    single = of_one[of_one["lr"] == of_one.query("arm == 'full'")["lr"].iloc[0]]
    judged = convergence.judged(single)
    assert len(judged) == len(single) and judged["interior"].all() and convergence.targets(single)
    several = pd.concat([single, single.assign(lr=9.0)])
    assert convergence.judged(several).empty and not convergence.targets(several)
