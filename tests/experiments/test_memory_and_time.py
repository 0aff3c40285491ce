"""Claims D1, D2 and D6 from made-up rows: each ruling has rows that give it, and rows that do not."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest

from accumulation_harness.analysis.load import Results
from accumulation_harness.experiments.memory_and_time import answers as memory_and_time


def results(
    static: int, per_sample: int, seconds_at: dict[int, float], *, shared: int = 0, larger: tuple[int, ...] = ()
) -> Results:
    """Two kinds of model over N = 1, 4, 16 at B = 64; `shared`: bytes of activations that do not depend on b.

    `larger`: static bytes of larger models of the first kind.
    """
    sizes = [("a", "conv", static), ("b", "mlp", static), ("c", "mlp", 2 * static)]
    sizes += [(f"large-{size}", "conv", size) for size in larger]
    rows = [
        {
            "trial": trial, "workload": "digits", "model": model, "optimizer": "sgd", "accumulation_steps": num,
            "effective_batch": 64, "micro_batch": 64 // num, "parameter_bytes": own, "gradient_bytes": 0, "state_bytes": 0,
            "activation_bytes": per_sample * 64 // num + shared, "total_bytes": own + per_sample * 64 // num + shared,
            "alive_bytes": own + per_sample * 64 // num + shared,
            "seconds": seconds_at[num], "samples_per_second": 64 / seconds_at[num],
        }
        for trial, model, own in sizes
        for num in (1, 4, 16)
    ]  # fmt: skip
    empty = {field.name: () if field.name == "missing" else pd.DataFrame() for field in dataclasses.fields(Results)}
    return Results(**{**empty, "measurements": pd.DataFrame(rows)})


FLAT, LINEAR, ODD = {1: 1.0, 4: 1.0, 16: 1.02}, {1: 1.0, 4: 4.0, 16: 4.0}, {1: 1.0, 4: 2.0, 16: 7.0}


@pytest.mark.parametrize(
    ("given", "fell"),
    [
        (
            results(6400, 1000, LINEAR, larger=(30_000,)),
            {"D1": "conditional", "D2": "confirmed", "D4": "conditional", "D6": "conditional", "G4": "conditional"},
        ),
        (results(0, 100, FLAT), {"D1": "confirmed", "D2": "confirmed", "D6": "confirmed"}),
        (results(0, 100, ODD, shared=6400), {"D1": "refuted", "D2": "refuted", "D6": "refuted"}),
        (results(6400, 10, FLAT, larger=(30_000,)), {"D4": "refuted"}),  # nothing to trade
        (results(6400, 0, FLAT), {"G4": "refuted"}),
    ],
)
def test_rulings(given: Results, fell: dict[str, str]) -> None:
    rules = {claim.id: claim.decide for claim in memory_and_time.CLAIMS}
    assert {name: rules[name](given).verdict for name in fell} == fell


def test_the_largest_model_is_one_that_was_measured_within_the_budget() -> None:
    found = memory_and_time.largest_models(results(6400, 1000, FLAT, larger=(12_800, 30_000, 70_000)).measurements)
    conv = found[found["family"].str.contains("conv")].set_index("accumulation_steps")["larger"]
    assert conv[4] == pytest.approx(30_000 / 6400) and conv[16] == pytest.approx(30_000 / 6400), (
        "70,400 bytes hold 30,000 + 16,000"
    )
