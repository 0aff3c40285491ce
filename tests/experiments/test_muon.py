"""The finding on Muon follows the numbers, and the page of a tiny run."""

from __future__ import annotations

import pandas as pd

from accumulation_harness.experiments.muon.answers import finding

ERRORS = {"permuted": (1e-7, 3e-3), "accumulated": (1e-7, 3e-3), "bfloat16_sum": (2e-3, 0.1), "per_micro_batch": (1e-7, 0.8)}


def rows(**changes: tuple[float, float]) -> pd.DataFrame:
    """Three seeds in both formats; `changes` of the errors of gradient and update, by arm, in float32."""
    return pd.DataFrame([
        {"trial": f"{precision}-{seed}", "precision": precision, "arm": arm, "windows": 30, "length": 0.5,
         "same": 30 if precision == "float64" else 0, "orthogonalisations": 4 if arm == "per_micro_batch" else 1,
         "gradient_error": gradient, "update_error": update * (1 + 0.1 * seed), "lift": update / gradient}
        for precision in ("float32", "float64") for seed in range(3)
        for arm, (gradient, update) in (ERRORS | changes).items()
    ])  # fmt: skip


def test_the_finding_follows_the_numbers() -> None:
    right = finding(rows())
    assert "to the bit in 90 of 90 windows" in right and "no more than rounding: yes" in right
    assert "another update: yes" in right and "10-fold or more: yes" in right and "at every N: yes" in right
    assert "no more than rounding: no" in finding(rows(accumulated=(1e-7, 1e-2)))
    assert "another update: no" in finding(rows(per_micro_batch=(1e-7, 1e-2)))
    assert "10-fold or more: no" in finding(rows(bfloat16_sum=(2e-3, 3e-3)))
    assert "at every N: no" in finding(rows().assign(orthogonalisations=4))
    assert "rounding: undecided" in finding(rows()[lambda table: table["trial"] == "float32-0"]), "one trial has no interval"
