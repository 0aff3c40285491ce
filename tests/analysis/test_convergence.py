"""Quantities of learning curves against independent oracles, and rules that find what is planted and nothing else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.experiments.convergence import trainings as convergence
from accumulation_harness.experiments.convergence.trainings import Comparison, Reach, area, drift, median_reach, reach, roughness

SAMPLES = [float(i) for i in range(0, 1010, 10)]


def test_a_target_is_reached_where_the_closed_form_says() -> None:
    loss = [2.0 - 0.0015 * s for s in SAMPLES]
    assert reach(SAMPLES, loss, 1.4) == Reach(pytest.approx(400.0), True)
    assert reach(SAMPLES, loss, 0.3) == Reach(1000.0, False)
    assert reach(SAMPLES, loss, 5.0) == Reach(0.0, True)
    assert reach(SAMPLES, [math.nan] * len(SAMPLES), 1.0) == Reach(1000.0, False)


def test_area_and_drift() -> None:
    loss = [math.exp(-s / 300) for s in SAMPLES]
    assert area(SAMPLES, loss) == pytest.approx(300 * (1 - math.exp(-10 / 3)) / 1000, rel=1e-4)
    assert abs(drift([1.0] * 50)) < convergence.FLAT < abs(drift(loss))
    assert drift([3.0] * 40 + [2.0] * 5 + [1.0] * 5) == pytest.approx(-0.5)


def test_roughness_is_the_deviation_of_white_noise_and_blind_to_a_steady_decay() -> None:
    noise = np.random.default_rng(0).normal(0, 0.03, 20_000)
    assert roughness(np.exp(noise).tolist()) == pytest.approx(0.03, rel=0.03)
    assert roughness(np.exp(noise - np.linspace(0, 9, 20_000)).tolist()) == pytest.approx(0.03, rel=0.03)
    assert roughness(np.exp(-np.linspace(0, 9, 50)).tolist()) == pytest.approx(0, abs=1e-12)
    assert roughness([1e6, 1.0, *[1.0] * 18]) == 0, "the first tenth is not looked at"


def kaplan_meier(costs: list[float], reached: list[bool]) -> float:
    """By redistribution to the right (Efron 1967): a censored training gives its weight to those that ran longer."""
    order = sorted(range(len(costs)), key=lambda i: (costs[i], not reached[i]))
    weight = dict.fromkeys(order, 1 / len(costs))
    arrived = 0.0
    for place, i in enumerate(order):
        later = order[place + 1 :]
        if reached[i]:
            arrived += weight[i]
            if arrived >= 0.5 - 1e-12:
                return costs[i]
        else:
            for j in later:
                weight[j] += weight[i] / len(later)
    return math.nan


def test_the_censored_median_is_kaplan_and_meiers() -> None:
    draws = np.random.default_rng(0)
    for _ in range(200):
        costs = [float(c) for c in draws.permutation(40)[: draws.integers(1, 12)]]
        reached = [bool(r) for r in draws.random(len(costs)) < 0.6]
        mine = median_reach([Reach(c, r) for c, r in zip(costs, reached, strict=True)])
        assert mine == pytest.approx(kaplan_meier(costs, reached), nan_ok=True)
    assert median_reach([Reach(1, True), Reach(2, False), Reach(2, False)]) != 2  # a censored cost is not an arrival


def rows(effect: float = 0.0, noise: float = 0.002, seeds: int = 10, best: float = 0.2) -> pd.DataFrame:
    """Trials of one setting: test losses of a full batch, its null, its accumulation, and a small batch `effect` apart."""
    draws = np.random.default_rng(5)
    found: list[dict[str, Any]] = []
    for seed in (*range(seeds), 100, 101):
        base = 1 + 0.02 * draws.standard_normal()
        for lr in (0.1, 0.2, 0.4):
            penalty = abs(math.log2(lr / best))
            for arm, num, shift in (("full", 1, 0.0), ("permuted", 1, 0.0), ("accumulated", 4, 0.0), ("small_batch", 4, effect)):
                end = base + shift + penalty + (0 if arm == "full" else noise * draws.standard_normal())
                curve = [end + (2 - end) * math.exp(-i / 8) for i in range(51)]
                found.append({
                    "workload": "mnist1d", "norm": "none", "optimizer": "sgd", "effective_batch": 64, "steps": 500, "arm": arm,
                    "accumulation_steps": num, "seed": seed, "lr": lr, "test_loss": end, "validation_loss": end,
                    "curve_probe_loss": curve, "curve_validation_loss": [*curve[:-1], end],
                    "curve_samples": list(range(51)), "trial": f"{seed}-{lr}",
                })  # fmt: skip
    return pd.DataFrame(found)


def compared(effect: float, **changes: Any) -> dict[str, Comparison]:
    judged = convergence.judged(rows(effect, **changes))
    return {str(one.key[4]): one.verdict for one in convergence.beside_full(judged)}


def test_a_planted_effect_is_found_and_a_planted_nothing_is_not() -> None:
    same = {"permuted": Comparison.same, "accumulated": Comparison.same}
    assert compared(0.05) == same | {"small_batch": Comparison.worse}
    assert compared(-0.05) == same | {"small_batch": Comparison.better}
    assert compared(0.0) == same | {"small_batch": Comparison.same}
    assert set(compared(0.01, noise=0.2).values()) == {Comparison.undecided}


def test_a_rate_is_tuned_on_the_seeds_that_do_not_judge_and_must_lie_inside_the_grid() -> None:
    inside = rows()
    table = convergence.tuned(inside)
    assert set(table["lr"]) == {0.2} and table["interior"].all()
    liar = inside.assign(validation_loss=inside["validation_loss"] - 9 * ((inside["seed"] < 100) & (inside["lr"] == 0.4)))
    assert set(convergence.tuned(liar)["lr"]) == {0.2}  # the judging seeds have no say
    edge = convergence.tuned(rows(best=0.4))
    assert set(edge["lr"]) == {0.4} and not edge["interior"].any()
    assert set(convergence.judged(inside)["seed"]) == set(range(10))
    assert convergence.judged(inside[inside["seed"] < 100]).empty


def test_what_computes_the_full_batch_has_its_rate_whatever_its_own_trials_say() -> None:
    everything = rows()
    tuning, shares = everything["seed"] >= 100, everything["arm"].isin(("permuted", "accumulated"))
    liar = everything.assign(validation_loss=everything["validation_loss"] - 9 * (tuning & shares & (everything["lr"] == 0.4)))
    expected = convergence.judged(everything)
    assert set(expected["arm"]) == {"full", "permuted", "accumulated", "small_batch"} and set(expected["lr"]) == {0.2}
    for other in (liar, everything[~(tuning & shares)]):
        pd.testing.assert_frame_equal(convergence.judged(other)[["arm", "seed", "lr"]], expected[["arm", "seed", "lr"]])


def test_targets_come_from_the_tuning_seeds() -> None:
    frame = rows()
    (levels,) = convergence.targets(frame).values()
    tuning = frame[(frame["seed"] >= 100) & (frame["arm"] == "full") & (frame["lr"] == 0.2)]
    end = np.mean([curve[-1] for curve in tuning["curve_probe_loss"]])
    assert levels == pytest.approx([2 - share * (2 - end) for share in (0.5, 0.8, 0.95)])


def test_spread_is_measured_by_the_nulls() -> None:
    frame = rows(noise=0.01)
    wide = frame.assign(test_loss=frame["test_loss"] + 0.5 * (frame["arm"] == "accumulated") * (frame["seed"] % 2))
    spreads = [{str(one.key[4]): one.spread for one in convergence.beside_full(convergence.judged(f))} for f in (frame, wide)]
    assert spreads[0]["permuted"] == 1 and 0.4 < spreads[0]["accumulated"] < 2.5
    assert spreads[1]["accumulated"] > 10
