"""False alarms of correct trials: how they are counted, and what would refute the prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import report
from experiments import calibration


def correct_arms(num_trials: int, verdicts: dict[tuple[int, str], str] | None = None) -> pd.DataFrame:
    """Arms as `load` gives them, four a trial and precision."""
    rows: list[dict[str, Any]] = []
    for trial, precision in ((t, p) for t in range(num_trials) for p in ("float64", "float32", "float16", "bfloat16")):
        for n in (1, 2, 3, 5):
            verdict = (verdicts or {}).get((trial, precision), "equivalent") if n == 2 else "equivalent"
            rows.append({"trial": f"{trial}-{precision}", "arm": "accumulated" if n > 1 else "permuted", "verdict": verdict,
                         "accumulation_steps": n, "precision": precision, "counters": ""})  # fmt: skip
    errors = dict.fromkeys(("gradient_error", "state_error", "loss_error", "trajectory_error"), 1e-15)
    fine = {"rounding_ratio": 1.0, "rounding_high": 1.1, "full_error": 1e-7, "scale": 1.0, "cosine": 1.0, "rank_p": 0.5}
    cases = {"clipping_active": True, "short_windows": 0, "unequal_terms": True}
    return pd.DataFrame(rows).assign(**errors, **fine, **cases, reasons="")


@pytest.mark.parametrize(
    ("num", "verdicts", "holds"),
    [
        (250, {}, True),
        (249, {}, None),  # 996 trials: too few
        (250, {(7, "float32"): "degraded"}, False),
        (250, {(7, "float64"): "different"}, False),
        (250, {(7, "float64"): "inconclusive"}, True),  # not judged: no alarm
        (20, {(7, "float32"): "degraded"}, False),  # one is enough
        (250, {(t, "float16"): "degraded" for t in range(10)}, True),  # 10 of 1,000 arms
        (250, {(t, "float16"): "degraded" for t in range(11)}, False),
        (250, {(t, "bfloat16"): "different" for t in range(11)}, False),
    ],
)
def test_the_prediction_of_the_calibration(num: int, verdicts: dict[tuple[int, str], str], holds: bool | None) -> None:
    found = calibration.answer(correct_arms(num, verdicts))
    assert found.holds is holds
    assert ("could not be judged" in found.sentences[0]) is ("inconclusive" in verdicts.values())


def test_alarms_are_counted_by_level() -> None:
    arms = correct_arms(2)
    arms.loc[0, "gradient_error"] = 1e-3
    arms.loc[1, "counters"] = "optimizer steps"
    arms.loc[arms["precision"] == "float16", "rounding_high"] = 3.0
    levels = calibration.judged(arms)[list(calibration.LEVELS)].sum()
    assert levels.to_dict() == {"L0": 1, "L1": 8, "L2": 1}


def test_vacuous_trials_do_not_count(results: Path, tmp_path: Path, make_trial) -> None:
    """Of three trials one has no short window; unequal terms are there with N = 4 only."""
    for seed in range(3):
        names = [("accumulated", 2), ("accumulated", 4)]
        change = {name: {"short_windows": int(seed > 0), "unequal_terms": name[1] == 4} for name in names}
        make_trial(experiment="calibration", seed=seed, change=change)
    assert report.main(["--results", str(results), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "index.html").read_text()
    rows = [row.replace("<td>", "").split("</td>")[:-1] for row in page.split("<tr>") if row.startswith("<td>")]
    counts = {row[0]: row[2:6] for row in rows}
    assert counts["clipping"] == ["3", "0", "6", "0"]
    assert counts["short windows"] == ["2", "1", "4", "0"]
    assert counts["unequal terms"] == ["3", "0", "3", "0"]


def test_the_page(results: Path, tmp_path: Path, make_trial) -> None:
    make_trial(experiment="calibration")
    assert report.main(["--results", str(results), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "index.html").read_text()
    assert "False alarms by level" in page and "Could these trials have failed?" in page
