"""The rules of `experiments/equivalence.py` on arms made by hand. The answer to its question: `tests/analysis/test_report.py`."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from analysis import load
from analysis.question import ClaimResult
from experiments.equivalence import CLAIMS


def decide(name: str, arms: pd.DataFrame) -> ClaimResult:
    (one,) = [claim for claim in CLAIMS if claim.id == name]
    empty = pd.DataFrame({"experiment": []})
    return one.decide(load.Results(arms, empty, empty, ()))


def arms(*rows: dict[str, object]) -> pd.DataFrame:
    usual = {"arm": "accumulated", "norm": "none", "verdict": "equivalent", "algebra_error": 1e-15, "scale": 1.0, "ragged": False,
             "counters_ok": True, "effective_batch": 8, "accumulation_steps": 4, "micro_batch": 2}  # fmt: skip
    return pd.DataFrame([usual | row for row in rows])


FREE: dict[str, object] = {}
BOUND: dict[str, object] = {"norm": "batch", "verdict": "different", "algebra_error": 0.1}
UNDIVIDED: dict[str, object] = {"arm": "loss_not_divided", "verdict": "different", "scale": 4.001}
CASES = {
    "A1": [
        ((FREE, BOUND), "conditional"),
        ((FREE, BOUND | {"verdict": "equivalent"}), "confirmed"),
        ((FREE | {"verdict": "different"}, BOUND), "refuted"),
        ((FREE,), "needs the full grid"),
    ],
    "A2": [
        ((FREE,), "refuted"),
        ((FREE | {"algebra_error": 1e-7},), "confirmed"),
        ((FREE, FREE | {"algebra_error": math.nan}), "conditional"),
        ((BOUND,), "needs the full grid"),
    ],
    "A3": [
        ((FREE, UNDIVIDED), "conditional"),
        ((FREE, UNDIVIDED | {"scale": 1.0}), "refuted"),
        ((FREE,), "needs the full grid"),
    ],
    "A5": [((FREE,), "refuted"), ((FREE, FREE | {"micro_batch": 3}), "confirmed"), ((UNDIVIDED,), "needs the full grid")],
    "A6": [
        ((FREE, UNDIVIDED), "confirmed"),
        ((FREE | {"verdict": "different"}, UNDIVIDED), "refuted"),
        ((FREE | {"effective_batch": 16}, UNDIVIDED), "needs the full grid"),
    ],
}


@pytest.mark.parametrize(("name", "rows", "verdict"), [(name, *case) for name, cases in CASES.items() for case in cases])
def test_rules_of_equivalence(name: str, rows: tuple[dict[str, object], ...], verdict: str) -> None:
    assert str(decide(name, arms(*rows)).verdict) == verdict
