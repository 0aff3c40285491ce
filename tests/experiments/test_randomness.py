"""The rule on results made by hand: each verdict reached."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from accumulation_harness.analysis import load, report
from accumulation_harness.analysis.question import Ruling
from accumulation_harness.config import Model, TrialConfig, WorkloadConfig, to_dict
from accumulation_harness.config.identity import identity
from accumulation_harness.experiments.randomness.answers import EXPERIMENT, single_runs_differ
from accumulation_harness.measure import studies
from accumulation_harness.results.store import Store


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


def test_the_page_of_a_real_run(tmp_path: Path) -> None:
    config = TrialConfig(
        experiment="randomness", study="randomness", workload=WorkloadConfig(model=Model.mlp, width=1, dropout=0.5),
        effective_batch=8, accumulation_steps=(2,), permutations=30,
    )  # fmt: skip
    with Store(tmp_path / "results").open_trial(config.experiment, identity(config), to_dict(config)) as writer:
        writer.finish(studies.run(config, lambda step, rows: None))
    page = (report.write(tmp_path / "results", tmp_path / "out").parent / "pages/randomness.html").read_text()
    assert EXPERIMENT.title in page and "by sample (remedy)" in page and "It takes 200 draws" in page
