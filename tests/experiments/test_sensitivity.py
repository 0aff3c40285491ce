"""Planted errors: how they are counted, and what would refute the prediction."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from accumulation_harness.analysis import load, report
from accumulation_harness.experiments.sensitivity import answers as sensitivity
from accumulation_harness.experiments.sensitivity.answers import smallest

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
    assert "No error was planted" in (tmp_path / "pages/sensitivity.html").read_text()


def test_a_kind_that_was_not_planted_is_not_found(results: Path, make_trial) -> None:
    plant(make_trial, "float32", 0, {"scale": 0, "direction": 0})
    assert sensitivity.answer(load.from_store(results)).holds is False
