"""Calibration and sensitivity: what is counted, and what would refute them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis import load, report
from experiments import calibration, sensitivity
from experiments.sensitivity import smallest

SIZES = ("1e-6", "3e-6", "1e-5")


def plant(make_trial, precision: str, seed: int, found_from: dict[str, int]) -> None:
    """A trial with every kind and size, found from the given place in SIZES on."""
    names = {f"{kind}@{size}": place for kind in found_from for place, size in enumerate(SIZES)}
    found = {"verdict": "degraded"}
    change = {(name, n): found for name, place in names.items() for n in (2, 4) if place >= found_from[name.partition("@")[0]]}
    make_trial(experiment="sensitivity", precision=precision, seed=seed, faults=dict.fromkeys(names, True), change=change)


def test_rates_of_planted_errors(results: Path, make_trial) -> None:
    for seed in range(4):
        plant(make_trial, "float32", seed, {"scale": 0, "direction": 1 if seed else 2, "tensor": 3})
    table = sensitivity.rates(load.from_store(results))
    assert table["n"].eq(8).all()  # two N
    counts = {(row.kind, row.size): row.k for row in table.itertuples()}
    assert counts == {
        ("scale", 1e-6): 8, ("scale", 3e-6): 8, ("scale", 1e-5): 8,
        ("direction", 1e-6): 0, ("direction", 3e-6): 6, ("direction", 1e-5): 8,
        ("tensor", 1e-6): 0, ("tensor", 3e-6): 0, ("tensor", 1e-5): 0,
    }  # fmt: skip
    assert list(dict.fromkeys(table["kind"])) == ["scale", "direction", "tensor"]
    sizes = {kind: smallest(rows) for kind, rows in table.groupby("kind")}
    assert (sizes["scale"], sizes["direction"]) == (1e-6, 1e-5)
    assert math.isnan(sizes["tensor"])


@pytest.mark.parametrize(
    ("counts", "size"),
    [
        ([19, 20, 20], 1.0),  # 95 % are enough
        ([18, 20, 20], 2.0),
        ([20, 18, 20], 3.0),  # a gap above
        ([20, 20, 18], math.nan),
    ],
)
def test_smallest_size_with_all_larger_ones(counts: list[int], size: float) -> None:
    found = smallest(pd.DataFrame({"size": [1.0, 2.0, 3.0], "k": counts, "n": 20}))
    assert found == size or (math.isnan(found) and math.isnan(size))


@pytest.mark.parametrize(("place", "holds"), [(2, True), (3, False)])
def test_the_prediction_of_the_sensitivity(results: Path, make_trial, monkeypatch, place: int, holds: bool) -> None:
    monkeypatch.setattr(sensitivity, "TARGETS", {"float32": 1e-5})
    for seed in range(10):  # of two N each
        plant(make_trial, "float32", seed, {"scale": 0, "direction": 0, "tensor": place})
        early = sensitivity.answer(load.from_store(results)).holds
        assert early is (False if not holds else True if seed == 9 else None)  # few trials can refute and not confirm
    assert sensitivity.answer(load.from_store(results)).holds is holds


def test_one_precision_alone_decides_nothing(results: Path, make_trial) -> None:
    plant(make_trial, "float32", 0, {"scale": 0, "direction": 0, "tensor": 0})
    assert sensitivity.answer(load.from_store(results)).holds is None


def test_nothing_planted_decides_nothing(results: Path, tmp_path: Path, make_trial) -> None:
    make_trial(experiment="sensitivity")
    assert sensitivity.answer(load.from_store(results)).holds is None
    assert report.main(["--results", str(results), "--out", str(tmp_path)]) == 0
    assert "No error was planted" in (tmp_path / "index.html").read_text()


def test_a_kind_that_was_not_planted_is_not_found(results: Path, make_trial) -> None:
    plant(make_trial, "float32", 0, {"scale": 0, "direction": 0})
    assert sensitivity.answer(load.from_store(results)).holds is False


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


def test_the_page_shows_both(results: Path, tmp_path: Path, make_trial) -> None:
    make_trial(experiment="calibration")
    for precision in ("float32", "float16"):
        plant(make_trial, precision, 0, {"scale": 0, "direction": 1, "tensor": 2})
    assert report.main(["--results", str(results), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "index.html").read_text()
    assert (tmp_path / "figures" / "sensitivity-rates.svg").exists()
    assert "from 1e-6 in scale, 3e-6 in direction, 1e-5 in one tensor (target 1e-5)" in page.replace("\u2011", "-")
    assert "False alarms by level" in page
    assert not (tmp_path / "faults.csv").exists()  # planted errors are no faults of the catalogue
    assert np.all([name in page for name in ("Could these trials have failed?", "What is found")])
