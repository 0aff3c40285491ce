"""False alarms of correct trials: how they are counted, and what would refute the prediction."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from accumulation_harness.analysis import report
from accumulation_harness.experiments import calibration
from accumulation_harness.judge.verdict import Doubt


def correct_arms(num_trials: int, changes: dict[int, dict[str, Any]] | None = None) -> pd.DataFrame:
    """Arms as `load` gives them, four a trial; of some trials the arm with N = 2 otherwise."""
    rows: list[dict[str, Any]] = []
    for trial in range(num_trials):
        precision = ("float64", "float32", "float16", "bfloat16")[trial % 4]
        for n in (1, 2, 3, 5):
            rows.append({"trial": str(trial), "arm": "accumulated" if n > 1 else "permuted", "verdict": "equivalent", "cause": "",
                         "explained": False, "accumulation_steps": n, "precision": precision, "counters": "",
                         "reasons": ""} | ((changes or {}).get(trial, {}) if n == 2 else {}))  # fmt: skip
    errors = dict.fromkeys(("gradient_error", "state_error", "loss_error", "trajectory_error"), 1e-15)
    fine = {"rounding_ratio": 1.0, "rounding_high": 1.1, "full_error": 1e-7, "scale": 1.0, "cosine": 1.0, "rank_p": 0.5}
    fine |= {"rounding_windows": 1, "parted_at": math.nan}
    cases = {"clipping_active": True, "short_windows": 0, "unequal_terms": True}
    return pd.DataFrame(rows).assign(**errors, **fine, **cases)


DEGRADED = {"verdict": "degraded"}
INHERENT = {"verdict": "different", "cause": "batch_statistics+stochastic_layers", "explained": True}
DIVERGED = {"verdict": "inconclusive", "reasons": str(Doubt.diverged)}
UNRESOLVED = {"verdict": "inconclusive", "reasons": f"{Doubt.unresolved}: by 1e-7"}


@pytest.mark.parametrize(
    ("num", "changes", "holds"),
    [
        (3000, {}, True),
        (2999, {}, None),  # too few
        (3000, {7: DEGRADED}, False),
        (20, {7: DEGRADED}, False),  # one is enough, however few there are
        (3000, {6: DEGRADED}, False),  # in float16 as well
        (3000, dict.fromkeys(range(900), INHERENT), True),
        (3000, {7: INHERENT | {"explained": False}}, False),
        (3000, {7: INHERENT | {"cause": "batch_statistics+mean_of_means"}}, False),
        (3000, {7: {"verdict": "different", "cause": "", "explained": True}}, False),
        (3000, dict.fromkeys(range(900), DIVERGED), True),  # a region that is named
        (3000, dict.fromkeys(range(60), UNRESOLVED), True),
        (3000, dict.fromkeys(range(61), UNRESOLVED), False),
    ],
)
def test_the_prediction_of_the_calibration(num: int, changes: dict[int, dict[str, Any]], holds: bool | None) -> None:
    assert calibration.answer(correct_arms(num, changes)).holds is holds


def test_what_was_not_judged_is_counted_by_its_region() -> None:
    found = calibration.answer(correct_arms(40, {1: DIVERGED, 2: DIVERGED, 3: UNRESOLVED, 4: INHERENT}))
    assert found.sentences[0] == "40 correct trials, 157 arms judged, 1 of them rightly different."
    assert "the training diverges: 2; outside them: 1 of 40 " in found.sentences[2]


def test_a_rejection_of_one_window_is_told_beside_those_of_three() -> None:
    arms = correct_arms(8)
    arms.loc[:1, "parted_at"] = 3.0  # two arms of one trial
    arms.loc[arms["precision"] == "float32", "rounding_windows"] = 2  # eight arms
    [*_, told] = calibration.answer(arms).sentences
    assert told.startswith("L1 rejects 8 of 24 ") and " 0 of 24 " in told and "in 1 trials" in told


def test_alarms_are_counted_by_level() -> None:
    arms = correct_arms(4)
    arms.loc[0, "gradient_error"] = 1e-3
    arms.loc[1, "counters"] = "optimizer steps"
    arms.loc[arms["precision"] == "float16", ["rounding_high", "full_error"]] = (3.0, 1e-3)
    levels = calibration.judged(arms)[list(calibration.LEVELS)].sum()
    assert levels.to_dict() == {"L0": 1, "L1": 4, "L2": 1}


def test_vacuous_trials_do_not_count(results: Path, tmp_path: Path, make_trial) -> None:
    """Of three trials one has no short window; unequal terms are there with N = 4 only."""
    for seed in range(3):
        names = [("accumulated", 2), ("accumulated", 4)]
        change = {name: {"short_windows": int(seed > 0), "unequal_terms": name[1] == 4} for name in names}
        make_trial(experiment="calibration", seed=seed, change=change)
    assert report.main(["--results", str(results), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "pages/calibration.html").read_text()
    rows = [row.replace("<td>", "").split("</td>")[:-1] for row in page.split("<tr>") if row.startswith("<td>")]
    counts = {row[0]: row[2:6] for row in rows}
    assert counts["clipping"] == ["3", "0", "6", "0"]
    assert counts["short windows"] == ["2", "1", "4", "0"]
    assert counts["unequal terms"] == ["3", "0", "3", "0"]


def test_the_page(results: Path, tmp_path: Path, make_trial) -> None:
    make_trial(experiment="calibration")
    assert report.main(["--results", str(results), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "pages/calibration.html").read_text()
    assert "False alarms by level" in page and "Could these trials have failed?" in page
