"""The rules of `experiments/batchnorm.py` on rows made by hand, and a page of one real trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pandas as pd
import pytest

from accumulation_harness.analysis.load import Results
from accumulation_harness.analysis.question import Ruling
from accumulation_harness.experiments.batchnorm.answers import CLAIMS, costs_accuracy
from tests.experiments.accuracy_rows import BATCH, LARGE, results, two_batches

RULES = {claim.id: claim.decide for claim in CLAIMS}
EXPECTED = {claim.id: claim.expects for claim in CLAIMS}
NEAR, FAR = 1e-15, 0.3
EXACT_ROW = {
    "experiment": "batchnorm", "trial": "t", "study": "batch_statistics", "norm": "batch", "model": "mlp", "after_steps": 0,
    "momentum": 0.1, "split_error": NEAR, "oracle_error": None, "oracle_statistics_error": None, "forwards": 1.0,
}  # fmt: skip
# gradient_error, change, statistics_error, first_statistics_error of each arm as the theory has them
ARMS = {
    "accumulated": (FAR, 0.0, FAR, FAR),
    "corrected_momentum": (FAR, 0.0, 0.01, 0.01),
    "window_statistics": (FAR, 0.0, 0.01, NEAR),
    "two_pass_statistics": (NEAR, FAR, NEAR, NEAR),
}


def exact(arm: str, n: int, momentum: float = 0.1) -> dict[str, Any]:
    columns = dict(zip(("gradient_error", "change", "statistics_error", "first_statistics_error"), ARMS[arm], strict=True))
    oracle = (
        {"oracle_floor": NEAR, "oracle_error": NEAR, "oracle_statistics_error": NEAR}
        if arm == "accumulated" and momentum == 0.1
        else {}
    )
    effective = 1 - (1 - momentum) ** n if arm == "accumulated" else momentum
    own = {"arm": arm, "accumulation_steps": n, "micro_batch": 64 // n, "momentum": momentum, "effective_momentum": effective}
    return {**EXACT_ROW, **columns, **own, **oracle}


def rows_as_expected() -> list[dict[str, Any]]:
    usual = [exact(arm, n) for arm in ARMS for n in (2, 8)]
    return usual + [exact(arm, n, 0.5) for arm in ("accumulated", "corrected_momentum") for n in (2, 8)]


def made_of(rows: list[dict[str, Any]]) -> Results:
    nothing = pd.DataFrame()
    return Results(nothing, pd.DataFrame(rows, columns=None if rows else ["experiment", "trial"]), nothing, ())


def changed(arm: str, **columns: Any) -> Results:
    """As expected but for one arm."""
    return made_of([row | columns if row["arm"] == arm else row for row in rows_as_expected()])


@pytest.mark.parametrize("name", ["B1", "B2", "B5"])
def test_as_the_theory_has_it(name: str) -> None:
    finding = RULES[name](made_of(rows_as_expected()))
    assert finding.verdict == EXPECTED[name] and finding.n > 0


@pytest.mark.parametrize("name, arm, columns, verdict", [
    ("B1", "accumulated", {"gradient_error": NEAR}, Ruling.refuted),
    ("B1", "accumulated", {"oracle_error": 1e-6}, Ruling.conditional),
    ("B1", "accumulated", {"oracle_error": 5e-12, "oracle_floor": 1e-12}, Ruling.confirmed),
    ("B1", "accumulated", {"oracle_error": 5e-12, "oracle_floor": 1e-13}, Ruling.conditional),
    ("B1", "accumulated", {"oracle_statistics_error": 1e-6}, Ruling.conditional),
    ("B2", "window_statistics", {"first_statistics_error": 1e-6}, Ruling.confirmed),
    ("B2", "two_pass_statistics", {"gradient_error": 1e-6}, Ruling.confirmed),
    ("B2", "two_pass_statistics", {"statistics_error": 1e-6}, Ruling.confirmed),
    ("B2", "window_statistics", {"gradient_error": NEAR}, Ruling.refuted),
    ("B5", "accumulated", {"effective_momentum": 0.1}, Ruling.refuted),
    ("B5", "corrected_momentum", {"effective_momentum": 0.11}, Ruling.refuted),
    ("B5", "corrected_momentum", {"change": 1e-6}, Ruling.refuted),
])  # fmt: skip
def test_one_arm_that_falls_otherwise(name: str, arm: str, columns: dict[str, Any], verdict: Ruling) -> None:
    assert RULES[name](changed(arm, **columns)).verdict == verdict


@pytest.mark.parametrize("name", RULES)
def test_without_rows_nothing_is_decided(name: str) -> None:
    assert RULES[name](made_of([])).verdict == Ruling.needs_full_grid


@pytest.mark.parametrize("small, large, verdict", [
    (BATCH, LARGE, Ruling.conditional),
    (dict.fromkeys(BATCH, 3.0), dict.fromkeys(LARGE, 3.0), Ruling.refuted),
    (dict.fromkeys(BATCH, 9.0) | {32: 3.0}, dict.fromkeys(LARGE, 9.0) | {128: 3.0}, Ruling.confirmed),
    (BATCH, LARGE | {16: 9.0}, Ruling.conditional),
    (BATCH, {128: 3.0, 8: 3.5}, Ruling.conditional),
    ({32: 3.0, 2: 30.0}, {128: 3.0, 2: 30.0}, Ruling.needs_full_grid),  # one b
])  # fmt: skip
def test_rule_of_b4(small: Mapping[int, float], large: Mapping[int, float], verdict: Ruling) -> None:
    assert costs_accuracy(two_batches(small, large)).verdict == verdict


def test_the_condition_of_b4_calls_a_b_free_only_where_every_n_is() -> None:
    made = two_batches({32: 3.0, 8: 3.0, 2: 30.0}, {128: 3.0, 8: 3.0, 2: 30.0})
    assert costs_accuracy(made).condition == "for mlp at b = 2; not for mlp at b = 8"
    rows = made.measurements
    scattered = (rows["micro_batch"] == 8) & (rows["effective_batch"] == 128)  # N = 16: neither within a point nor beyond chance
    rows.loc[scattered, "held_out_accuracy"] += 0.02 * (rows.loc[scattered, "seed"] - 2.5) / 2.5
    assert costs_accuracy(made).condition == "for mlp at b = 2; undecided for mlp at b = 8"


def test_b4_counts_batch_norm_alone() -> None:
    both = results()
    alone = dataclasses.replace(both, measurements=both.measurements[both.measurements["norm"] == "batch"])
    assert costs_accuracy(both) == costs_accuracy(alone) and len(alone.measurements) < len(both.measurements)


def test_b4_takes_four_seeds() -> None:
    few = two_batches(BATCH, LARGE)
    rows = few.measurements
    assert costs_accuracy(dataclasses.replace(few, measurements=rows[rows["seed"] < 4])).verdict == Ruling.conditional
    assert costs_accuracy(dataclasses.replace(few, measurements=rows[rows["seed"] < 3])).verdict == Ruling.needs_full_grid
