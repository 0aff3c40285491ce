"""The rule on results made by hand: each verdict reached."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.analysis.question import Ruling
from accumulation_harness.experiments.randomness.answers import single_runs_differ


def results(*, one: float = 0.5, several: float = 1.0, remedy: float = 1e-15, spread: float = 1.0, shift: float = 1.0,
            repeated: float = 1.6, draws: int = 200, trials: str = "ab") -> load.Results:  # fmt: skip
    rows: list[dict[str, Any]] = []
    for trial, layers, num in itertools.product(trials, (1, 3), (3, 12)):
        about = {
            "trial": trial,
            "dropout_layers": layers,
            "accumulation_steps": num,
            "draws": draws,
            "noise": 0.4,
            "mean_shift": shift,
        }
        apart = one if layers == 1 else several
        rows += [
            {**about, "masks": "accumulated", "distance": apart, "largest_distance": apart, "spread_ratio": spread},
            {**about, "masks": "masks_of_samples", "distance": remedy, "largest_distance": remedy, "spread_ratio": 1.0},
            {**about, "masks": "masks_repeated", "distance": 1.0, "largest_distance": 1.0, "spread_ratio": repeated},
        ]
    empty = pd.DataFrame(columns=["experiment", "trial"])
    return load.Results(empty, pd.DataFrame(rows), empty, ())


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Ruling.confirmed),
        ({"one": 1e-16}, Ruling.conditional),
        ({"one": 1e-16, "several": 1e-16}, Ruling.refuted),
        ({"remedy": 1e-3}, Ruling.conditional),
        ({"spread": 1.4}, Ruling.conditional),
        ({"shift": 8.0}, Ruling.conditional),
        ({"repeated": 1.05}, Ruling.needs_full_grid),
        ({"draws": 40}, Ruling.needs_full_grid),
        ({"trials": "a"}, Ruling.needs_full_grid),
    ],
)
def test_b6(changes: dict[str, Any], verdict: Ruling) -> None:
    assert single_runs_differ(results(**changes)).verdict == verdict
