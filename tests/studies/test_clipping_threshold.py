from __future__ import annotations

import pytest

from accumulation_harness.config import TrialConfig
from accumulation_harness.measure import studies

N = 4
CONFIG = TrialConfig(study="clipping_threshold", effective_batch=24, accumulation_steps=(N,), seed=4)
EPSILON = 1e-4  # PyTorch adds 1e-6 to the norm it divides by; the norms here are near 1


def test_what_each_threshold_leaves_of_the_gradient() -> None:
    """Of a gradient of norm 1, averaged, or 4, summed, clipped at f·c with c = 1/2 or 3/2: |left / right - 1| by hand."""
    rows = studies.run(CONFIG, lambda step, rows: None)["measurements"]
    assert len(rows) == 12
    for row in rows:
        norm, c = (1.0 if row["arm"] == "averaged" else N), (0.5 if row["threshold"] == "clipped" else 1.5)
        right, left = min(1.0, c), min(norm, row["factor"] * c)
        assert row["error"] == pytest.approx(abs(left / right - 1), abs=EPSILON)
        assert row["error_of_nth"] == pytest.approx(abs(left / N / right - 1), abs=EPSILON)


def test_which_are_exact() -> None:
    rows = studies.run(CONFIG, lambda step, rows: None)["measurements"]
    exact = {(row["arm"], row["factor"]) for row in rows if row["error"] <= 1e-12 and row["threshold"] == "clipped"}
    assert ("averaged", 1.0) in exact and ("averaged", 4.0) not in exact
