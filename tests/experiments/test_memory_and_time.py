"""Claims D1, D2 and D6 from made-up rows: each ruling has rows that give it, and rows that do not."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest

from analysis.load import Results
from analysis.question import Ruling
from experiments import memory_and_time


def results(static: int, per_sample: int, seconds_at: dict[int, float], *, shared: int = 0) -> Results:
    """Two trials over N = 1, 4, 16 at B = 64; `shared`: bytes of activations that do not depend on b."""
    rows = [
        {
            "trial": trial, "workload": "digits", "model": "conv", "optimizer": "sgd", "accumulation_steps": num,
            "micro_batch": 64 // num, "parameter_bytes": static, "gradient_bytes": 0, "state_bytes": 0,
            "activation_bytes": per_sample * 64 // num + shared, "total_bytes": static + per_sample * 64 // num + shared,
            "seconds": seconds_at[num], "samples_per_second": 64 / seconds_at[num],
        }
        for trial in ("a", "b")
        for num in (1, 4, 16)
    ]  # fmt: skip
    empty = {field.name: () if field.name == "missing" else pd.DataFrame() for field in dataclasses.fields(Results)}
    return Results(**{**empty, "measurements": pd.DataFrame(rows)})


FLAT, LINEAR = {1: 1.0, 4: 1.0, 16: 1.02}, {1: 1.0, 4: 4.0, 16: 16.0}


@pytest.mark.parametrize(
    ("given", "memory", "activations", "time"),
    [
        (results(6400, 100, LINEAR), Ruling.refuted, Ruling.confirmed, Ruling.conditional),
        (results(0, 100, FLAT), Ruling.confirmed, Ruling.confirmed, Ruling.confirmed),
        (results(0, 100, FLAT, shared=6400), Ruling.refuted, Ruling.refuted, Ruling.confirmed),
    ],
)
def test_rulings(given: Results, memory: Ruling, activations: Ruling, time: Ruling) -> None:
    rulings = {claim.id: claim.decide(given).verdict for claim in memory_and_time.CLAIMS}
    assert rulings == {"D1": memory, "D2": activations, "D6": time}


def test_measures_are_the_rows() -> None:
    found = {claim.id: claim.decide(results(6400, 100, LINEAR)) for claim in memory_and_time.CLAIMS}
    assert found["D1"].measured == pytest.approx(12800 / 8000) and found["D1"].n == 2
    assert found["D6"].measured == pytest.approx(16)
    assert memory_and_time.fitted(results(6400, 100, LINEAR).measurements) == pytest.approx((6400, 100))


def test_the_figure_has_time_against_memory_per_b() -> None:
    cost = memory_and_time.time_against_memory(results(6400, 100, LINEAR).measurements)
    assert cost["micro_batch"].tolist() == [4, 16, 64]
    assert cost["total_bytes"].tolist() == [6800, 8000, 12800]
    assert cost["slowdown"].tolist() == [16, 4, 1]
    assert cost["static_bytes"].tolist() == pytest.approx([6400] * 3)
