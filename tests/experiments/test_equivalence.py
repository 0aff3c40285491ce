"""The rules of `experiments/equivalence.py` on arms made by hand. The answer to its question: `tests/analysis/test_report.py`."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.analysis.question import ClaimResult
from accumulation_harness.experiments.equivalence.answers import CLAIMS


def decide(name: str, arms: pd.DataFrame) -> ClaimResult:
    (one,) = [claim for claim in CLAIMS if claim.id == name]
    empty = pd.DataFrame({"experiment": []})
    return one.decide(load.Results(arms, empty, empty, ()))


def arms(*rows: dict[str, object]) -> pd.DataFrame:
    usual = {"arm": "accumulated", "norm": "none", "verdict": "equivalent", "algebra_error": 1e-15, "scale": 1.0, "ragged": False,
             "counters_ok": True, "effective_batch": 8, "accumulation_steps": 4, "micro_batch": 2,
             "optimizer": "sgd", "precision": "float32"}  # fmt: skip
    return pd.DataFrame([usual | row for row in rows])


FREE: dict[str, object] = {}
BOUND: dict[str, object] = {"norm": "batch", "verdict": "different", "algebra_error": 0.1}
UNDIVIDED: dict[str, object] = {"arm": "loss_not_divided", "verdict": "different"}
BOTH = UNDIVIDED | BOUND
APART, SAME = {"verdict": "different"}, {"verdict": "equivalent"}


def cells(*changes: dict[str, object], seeds: int = 5) -> tuple[dict[str, object], ...]:
    """The four cells of A6, each changed by its own."""
    return tuple(row | change for row, change in zip((FREE, UNDIVIDED, BOUND, BOTH), changes, strict=True) for _ in range(seeds))


AS_THEY_ARE = ({}, {}, {}, {})
CASES = {
    "A1": [
        ((FREE, BOUND), "conditional"),
        ((FREE, BOUND | SAME), "confirmed"),
        ((FREE | APART, BOUND), "refuted"),
        ((FREE,), "needs the full grid"),
    ],
    "A2": [
        ((FREE, BOUND), "conditional"),
        ((FREE, BOUND | {"algebra_error": 1e-15}), "refuted"),
        ((FREE | {"algebra_error": 1e-7}, BOUND), "confirmed"),
        ((FREE, FREE | {"algebra_error": math.nan}, BOUND), "conditional"),
        ((BOUND,), "needs the full grid"),
    ],
    "A5": [((FREE,), "wrong by arithmetic")],
    "A6": [
        (cells(*AS_THEY_ARE), "conditional"),
        (cells(SAME, SAME, SAME, SAME), "confirmed"),
        (cells(APART, {}, {}, {}), "refuted"),
        (cells({}, SAME, {}, {}), "needs the full grid"),
        ((*cells(*AS_THEY_ARE), FREE | APART), "needs the full grid"),
        (cells(*AS_THEY_ARE, seeds=4), "needs the full grid"),
        (cells({"effective_batch": 16}, {}, {}, {}), "needs the full grid"),
        (cells({"optimizer": "adam"}, {}, {}, {}), "needs the full grid"),
    ],
}


@pytest.mark.parametrize(("name", "rows", "verdict"), [(name, *case) for name, cases in CASES.items() for case in cases])
def test_rules_of_equivalence(name: str, rows: tuple[dict[str, object], ...], verdict: str) -> None:
    assert str(decide(name, arms(*rows)).verdict) == verdict


def test_an_algebra_that_a_16_bit_trial_repeats_counts_once() -> None:
    rows = arms(FREE, FREE | {"precision": "float16"}, BOUND, BOUND | {"precision": "float16"})
    assert decide("A1", rows).n == 2 and decide("A2", rows).n == 2
