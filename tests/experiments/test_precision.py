"""The rules on results made by hand, each verdict reached; and the page of a real tiny run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.analysis.question import Ruling
from accumulation_harness.experiments.precision.answers import (
    accuracy,
    mixed_precision,
    scaling_works,
    small_micro_batches,
)

FULL = 1e-7
Rows = list[dict[str, Any]]


def results(rows: Rows) -> load.Results:
    empty = pd.DataFrame(columns=["experiment", "trial"])
    return load.Results(empty, pd.DataFrame(rows), empty, ())


def rounding(
    *, precision: str = "float32", wide: float = 1.5, narrow: float = 1e4, grows: float = 5.0, wide_grows: float = 1.1
) -> Rows:
    """Errors at N = 1, 2 and 64 of B = 64; `wide` and `narrow`: over the full batch's own at N = 64."""
    rows: Rows = []
    for name, ratio, growth_ in (("float32", wide, wide_grows), ("bfloat16", narrow, grows), ("float16", narrow / 8, grows)):
        for num in (1, 2, 64):
            own = ratio if num == 64 else ratio / growth_
            rows.append({
                "trial": precision, "study": "accumulators", "precision": precision, "quantity": "error", "accumulator": name,
                "accumulation_steps": num, "micro_batch": 64 // num, "ratio": own, "low": 0.9 * own, "high": 1.1 * own,
                "full_error": FULL, "arm_error": own * FULL, "predicted_error": own * FULL,
            })  # fmt: skip
    return rows


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (rounding(), Ruling.conditional),
        (rounding(narrow=40, grows=1.5), Ruling.refuted),  # 16 bits as clean as float32: the claim falls altogether
        (rounding(wide=30), Ruling.confirmed),
        (rounding(wide_grows=3), Ruling.confirmed),
        (rounding(precision="bfloat16"), Ruling.needs_full_grid),
        ([row for row in rounding() if row["micro_batch"] > 2], Ruling.needs_full_grid),
    ],
)
def test_e1(rows: Rows, verdict: Ruling) -> None:
    assert small_micro_batches(results(rows)).verdict == verdict


def scaled(arm: str, **changes: Any) -> dict[str, Any]:
    right = {
        "trial": "t", "study": "loss_scaling", "arm": arm, "width": "float64", "error": 1e-15, "steps": 1, "steps_when_hit": 0,
        "scale_factor": 0.5, "moved": False, "error_after": 2e-15, "steps_after": 1,
    }  # fmt: skip
    return right | changes


RIGHT = [scaled("full"), scaled("accumulated"), scaled("accumulated", width="float16", error=1e-3)]


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([*RIGHT, scaled("clip_before_unscale", error=0.9)], Ruling.confirmed),
        ([*RIGHT, scaled("scaler_updated_in_window", scale_factor=1.0)], Ruling.confirmed),
        ([*RIGHT, scaled("clip_before_unscale")], Ruling.conditional),  # nothing tells the wrong order apart
        ([scaled("accumulated"), scaled("accumulated", moved=True), scaled("wrong", moved=True)], Ruling.conditional),
        ([scaled("accumulated", scale_factor=0.25), scaled("wrong", moved=True)], Ruling.refuted),
        ([scaled("accumulated", steps_when_hit=1), scaled("wrong", moved=True)], Ruling.refuted),
        ([scaled("accumulated", width="float16", error_after=0.1), scaled("wrong", moved=True)], Ruling.refuted),
        # a flipped ReLU, which the full batch has as well, is no fault of the scaling
        (
            [
                scaled("full", width="float16", error=0.06),
                scaled("accumulated", width="float16", error=0.061),
                scaled("wrong", moved=True),
            ],
            Ruling.confirmed,
        ),
        (RIGHT, Ruling.needs_full_grid),
    ],
)
def test_e2(rows: Rows, verdict: Ruling) -> None:
    assert scaling_works(results(rows)).verdict == verdict


def trainings(shift: float, seeds: int = 6, model: str = "mlp", accuracy: float = 0.95) -> Rows:
    """Accuracies of float32 and bfloat16, full and N = 4; those of bfloat16 are `shift` off."""
    rng = np.random.default_rng(0)
    return [
        {"study": "convergence", "precision": precision, "arm": "full" if num == 1 else "accumulated", "accumulation_steps": num,
         "seed": seed, "workload": "digits", "model": model, "held_out_accuracy": accuracy + own + rng.normal(0, 2e-3)}
        for seed in range(seeds) for precision, own in (("float32", 0.0), ("bfloat16", shift)) for num in (1, 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([*rounding(precision="bfloat16"), *trainings(0.001)], Ruling.conditional),  # on the one model
        ([*rounding(precision="bfloat16"), *trainings(0.001), *trainings(0.001, 6, "conv")], Ruling.conditional),  # no head-room
        ([*rounding(precision="bfloat16"), *trainings(0.001), *trainings(0.001, 6, "conv", 0.6)], Ruling.confirmed),
        ([*rounding(precision="bfloat16"), *trainings(-0.05)], Ruling.refuted),
        ([*rounding(precision="bfloat16"), *trainings(-0.01)], Ruling.undecided),
        ([*rounding(precision="bfloat16", wide=3), *trainings(0.001)], Ruling.undecided),
        ([*rounding(precision="bfloat16"), *trainings(0.001, seeds=2)], Ruling.needs_full_grid),
        (rounding(precision="bfloat16"), Ruling.needs_full_grid),
    ],
)
def test_e3(rows: Rows, verdict: Ruling) -> None:
    assert mixed_precision(results(rows)).verdict == verdict


def test_accuracies_are_paired_by_seed() -> None:
    rows = pd.DataFrame(trainings(0.02, seeds=5))
    cells = accuracy(rows).set_index("label")
    assert set(cells.index) == {"bfloat16 N=1 - float32 full", "bfloat16 N=4 - float32 full", "bfloat16 N=4 - bfloat16 full"}
    arms = {key: arm["held_out_accuracy"].to_numpy() for key, arm in rows.groupby(["precision", "accumulation_steps"])}
    own = arms["bfloat16", 4] - arms["float32", 1]
    found = cells.loc["bfloat16 N=4 - float32 full"]
    assert found["mean"] == pytest.approx(own.mean()) and found["n"] == 5
    assert found["high"] - found["mean"] == pytest.approx(2.776 * own.std(ddof=1) / math.sqrt(5), rel=1e-3)
