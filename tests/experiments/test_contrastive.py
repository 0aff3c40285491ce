"""Claims F1c to F5c from made-up rows: each ruling has rows that give it; and the page of a real run."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.analysis.question import ClaimResult, Ruling
from accumulation_harness.experiments.contrastive.answers import CLAIMS
from accumulation_harness.experiments.contrastive.sections import decided, difference, largest_windows
from tests.small_corpus import corpus

__all__ = ["corpus"]


def results(rows: list[dict[str, Any]]) -> load.Results:
    empty = pd.DataFrame(columns=["experiment", "trial"])
    return load.Results(empty, pd.DataFrame(rows), empty, ())


def decide(claim: str, rows: list[dict[str, Any]]) -> ClaimResult:
    return next(one for one in CLAIMS if one.id == claim).decide(results(rows))


def exact(
    error: float = 0.3, oracle: float = 1e-15, cached: float = 1e-15, held: int = 0, corpora: str = "a"
) -> list[dict[str, Any]]:
    """A window's rows at two N, in a trial for each corpus."""
    about = [
        {"study": "negatives", "corpus": name, "trial": name, "dropout": 0.0, "accumulation_steps": num}
        for name, num in itertools.product(corpora, (2, 8))
    ]
    return [
        {**one, **own}
        for one in about
        for own in (
            {"arm": "accumulated", "gradient_error": error, "oracle_error": oracle},
            {"arm": "grad_cache", "gradient_error": cached, "oracle_error": cached},
            {"arm": "dual_bank@8", "gradient_error": 1.0, "oracle_error": 1e-15, "held_with_gradient": held, "bank_entries": 8.0,
             "held_numbers_per_pair": 128},
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Ruling.refuted),
        ({"error": 1e-15}, Ruling.confirmed),
        ({"oracle": 1e-6}, Ruling.conditional),
        ({"error": 1e-5}, Ruling.conditional),
        ({"corpora": "ab"}, Ruling.needs_full_grid),
        ({"corpora": ""}, Ruling.needs_full_grid),
    ],
)
def test_f1c(changes: dict[str, Any], verdict: Ruling) -> None:
    assert decide("F1c", exact(**changes)).verdict == verdict


@pytest.mark.parametrize(("held", "verdict"), [(0, Ruling.refuted), (1, Ruling.confirmed)])
def test_f3c(held: int, verdict: Ruling) -> None:
    found = decide("F3c", exact(held=held))
    assert found.verdict == verdict and found.measured == held and "128 numbers" in found.explanation


def trained(
    *,
    gain: float = 2.0,  # points of the bank over accumulation
    seeds: int = 6,
    bank_bytes: float = 1.05,  # times accumulation's
    late: float = 0.001,
    ratios: tuple[float, float] = (0.2, 0.9),  # one bank, two banks
    slower: float = 1.2,
    full_bytes: float = 4.0,
    rates: tuple[float, ...] = (0.1,),
    tuning: int = 0,
    scatter: float = 0.001,  # of reciprocal ranks
) -> list[dict[str, Any]]:
    noise = np.random.default_rng(0)
    rows = []
    for seed, num, lr in itertools.product([*range(1, seeds + 1), *range(100, 100 + tuning)], (4, 16), rates):
        good = 0.0 if lr == rates[len(rates) // 2] else -0.05
        methods = {
            "full": (0.15, full_bytes, 1.0, 0.9), "accumulated": (0.10, 1.0, 1.0, 0.9), "grad_cache": (0.15, 1.0, 1.8, 0.9),
            "dual_bank@8": (0.10 + gain / 100, bank_bytes, slower, ratios[1]), "passage_bank@8": (0.1, 1.0, 1.1, ratios[0]),
            "small": (0.09, 1.0, 1.5, np.nan),
        }  # fmt: skip
        rows += [
            {"study": "retrieval", "corpus": "a", "trial": f"{seed} {num} {lr}", "group": f"{num} {lr}", "seed": seed, "lr": lr,
             "arm": arm, "steps": 352,
             "accumulation_steps": 1 if arm == "full" else num, "reciprocal_rank": rank + good + scatter * noise.normal(),
             "gain_of_last_quarter": late, "total_bytes": size, "seconds": seconds, "norm_ratio": ratio}
            for arm, (rank, size, seconds, ratio) in methods.items()
        ]  # fmt: skip
    return rows


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Ruling.confirmed),
        ({"gain": -3.0}, Ruling.refuted),
        ({"gain": 0.0}, Ruling.refuted),
        ({"gain": 0.5}, Ruling.confirmed),
        ({"seeds": 3}, Ruling.needs_full_grid),
        ({"late": 0.02}, Ruling.needs_full_grid),
        ({"bank_bytes": 1.3}, Ruling.needs_full_grid),
        ({"rates": (0.1, 0.2)}, Ruling.needs_full_grid),  # and nothing that would choose one
        ({"rates": (0.1, 0.2, 0.4), "tuning": 2}, Ruling.confirmed),
        ({"rates": (0.1, 0.2), "tuning": 2}, Ruling.undecided),  # the best is an end of the grid
        ({"scatter": 0.03}, Ruling.undecided),
    ],
)
def test_f2c(changes: dict[str, Any], verdict: Ruling) -> None:
    assert decide("F2c", trained(**changes)).verdict == verdict


def test_f2c_is_conditional_where_n_decides() -> None:
    better, worse = trained(gain=2.0), trained(gain=-3.0)
    rows = [one for one in better if one["accumulation_steps"] != 4] + [one for one in worse if one["accumulation_steps"] == 4]
    assert decide("F2c", rows).verdict == Ruling.conditional


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Ruling.confirmed),
        ({"slower": 0.9}, Ruling.conditional),
        ({"full_bytes": 1.0}, Ruling.refuted),
    ],
)
def test_f4c(changes: dict[str, Any], verdict: Ruling) -> None:
    found = decide("F4c", trained(**changes))
    assert found.verdict == verdict and found.measured == pytest.approx(changes.get("slower", 1.2))


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((0.2, 0.9), Ruling.confirmed),
        ((5.0, 1.2), Ruling.confirmed),
        ((0.9, 0.95), Ruling.conditional),  # one bank is not out of balance
        ((0.9, 0.2), Ruling.refuted),
    ],
)
def test_f5c(ratios: tuple[float, float], verdict: Ruling) -> None:
    assert decide("F5c", trained(ratios=ratios, rates=(0.1, 0.2))).verdict == verdict
    assert decide("F5c", trained(ratios=ratios)).verdict == Ruling.needs_full_grid


def test_learning_rates_are_chosen_on_seeds_that_do_not_decide() -> None:
    rows = pd.DataFrame(trained(rates=(0.1, 0.2), tuning=2))
    rows.loc[(rows["seed"] >= 100) & (rows["arm"] == "small") & (rows["lr"] == 0.1), "reciprocal_rank"] = 0.9
    own = decided(rows)
    assert set(own["seed"]) == set(range(1, 7))
    assert own.groupby("arm")["lr"].unique().map(list).to_dict() == {
        arm: [0.1 if arm == "small" else 0.2] for arm in set(rows["arm"])
    }
    busy = decided(rows.assign(seconds=rows["seconds"] * (1 + 9 * (rows["lr"] == 0.1))))  # when that rate was trained
    assert busy["slowness"].tolist() == pytest.approx(own["slowness"].tolist()) and not busy["seconds"].equals(own["seconds"])
    apart, n = difference(own, ("grad_cache", 16), ("accumulated", 16))
    assert n == 6 and apart.low < 5 < apart.high
    alone = [rows[rows["seed"] >= 100], *(own[own["arm"] == arm].assign(trial=f"{arm} alone") for arm in set(own["arm"]))]
    apart = decided(pd.concat(alone, ignore_index=True)).sort_values(["arm", "accumulation_steps", "seed"])
    expected = own.sort_values(["arm", "accumulation_steps", "seed"])
    for name in ("reciprocal_rank", "slowness"):
        assert apart[name].tolist() == pytest.approx(expected[name].tolist())


def test_shorter_trainings_of_the_same_store_are_others() -> None:
    rows = pd.DataFrame(trained(rates=(0.1, 0.2, 0.4), tuning=2))
    quick = rows[rows["lr"] == 0.1].assign(steps=110, reciprocal_rank=0.9)
    pd.testing.assert_frame_equal(decided(pd.concat([quick, rows], ignore_index=True)), decided(rows))


def test_the_largest_window_in_a_budget() -> None:
    lines = (("full", 0, 10), ("flat", 100, 1), ("heavy", 1000, 0))
    rows = pd.DataFrame(
        [{"arm": arm, "window": size, "peak_bytes": fixed + slope * size} for arm, fixed, slope in lines for size in (8, 16, 32)]
    )
    assert largest_windows(rows, 160) == {"flat": 32, "full": 16, "heavy": 0}
    assert largest_windows(rows, 159) == {"flat": 32, "full": 8, "heavy": 0}
