"""The rules of the experiment on Adam, on hand-built results and on a real tiny run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from accumulation_harness.analysis import ledger, report
from accumulation_harness.analysis.question import Ruling
from accumulation_harness.config import (
    Data,
    HarnessConfig,
    Model,
    OptimizerConfig,
    OptimizerName,
    Precision,
    TrackingConfig,
    TrackingMode,
    WorkloadConfig,
)
from accumulation_harness.experiments.adam import answers as adam
from accumulation_harness.sweep.experiment import run_one
from tests.experiments.optimizer_rows import Rows, results, state_rows

OPEN = Ruling.needs_full_grid


def scale_row(optimizer: str, eps: float, fault: float, **changes: Any) -> dict[str, Any]:
    about = {"trial": f"{optimizer}-{eps}-{changes}", "study": "adam_scale", "optimizer": optimizer, "eps": eps}
    row = {
        "weight_decay": 0.0,
        "clip_norm": math.nan,
        "accumulation_steps": 8,
        "right_error": 1e-15,
        "fault_error": fault,
        "fault_error_first": fault,
        "predicted_first": fault,
        "as_if_error": 0.0,
        "clipped_share": 0.0,
        "loss": 0.5,
        "loss_undivided": 0.5 * (1 + 1e-3 * fault),
    }
    return about | row | changes


def scales(**changes: Any) -> Rows:
    """Adam at three eps, AdamW, SGD, and what reveals; `changes` are of Adam at the usual eps."""
    return [
        scale_row("adam", 1e-8, **({"fault": 4e-4} | changes)),
        scale_row("adam", 1e-12, 4e-8),
        scale_row("adam", 1e-2, 1.6),
        scale_row("adamw", 1e-8, 4e-4, weight_decay=0.01),
        scale_row("adam", 1e-8, 0.5, weight_decay=0.01),
        scale_row("adam", 1e-8, 0.09, clip_norm=0.4, clipped_share=0.3, as_if_error=1e-6),
        scale_row("sgd", 1e-8, 7.0),
    ]


def verdict(rows: Rows) -> Ruling:
    return ledger.findings(adam.EXPERIMENT, results(rows))["C11"].verdict


def test_what_theory_expects() -> None:
    rows = [*scales(), *state_rows("adam"), *state_rows("adamw")]
    answer = ledger.answer(adam.EXPERIMENT, results(rows))
    assert "2 of 2 claims fell as theory expects." in answer.sentences and not answer.compared
    assert (
        "clipping that is sometimes active 0.09" in answer.sentences[1]
        and "weight decay in the gradient 0.5" in answer.sentences[1]
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (scales(fault=0.02), Ruling.refuted),  # seen at the usual eps
        (scales(loss_undivided=0.53), Ruling.refuted),  # the loss curve shows it
        (scales(fault_error=0.02), Ruling.confirmed),  # amplified by later steps, as any rounding is
        (scales(as_if_error=1e-11), Ruling.conditional),  # hidden, and not by eps / N
        (scales(right_error=1e-9), OPEN),
        (scales(predicted_first=5e-4), OPEN),
        ([row for row in scales() if row["optimizer"] != "sgd"], OPEN),
        ([*scales()[:-1], scale_row("sgd", 1e-8, 0.5)], OPEN),  # data in which SGD does not show the fault either
        ([row for row in scales() if row["eps"] != 1e-2], OPEN),
    ],
)
def test_what_would_change_the_verdict(rows: Rows, expected: Ruling) -> None:
    assert verdict(rows) == expected


def test_adams_own_states_decide_c3() -> None:
    def ruling(**change: Any) -> Ruling:
        return ledger.findings(adam.EXPERIMENT, results([*scales(), *state_rows("adam", **change)]))["C3"].verdict

    assert ruling() == Ruling.refuted
    assert ruling(change={("accumulated", "state_error"): 2e-12}) == Ruling.confirmed
    assert ledger.findings(adam.EXPERIMENT, results(scales()))["C3"].verdict == OPEN


def test_a_real_tiny_run_reaches_the_page(tmp_path: Path) -> None:
    store = tmp_path / "results"
    for name, eps, lr in ((OptimizerName.adam, 1e-8, 0.002), (OptimizerName.adam, 1e-2, 0.002), (OptimizerName.sgd, 1e-8, 0.1)):
        run_one(
            HarnessConfig(
                experiment="adam",
                study="adam_scale",
                workload=WorkloadConfig(data=Data.digits, model=Model.mlp, width=2),
                optimizer=OptimizerConfig(name=name, lr=lr, eps=eps),
                precision=Precision.float64,
                accumulation_steps=(8,),
                steps=3,
                results=str(store),
                tracking=TrackingConfig(mode=TrackingMode.disabled),
            )
        )
    page = (report.write(store, tmp_path / "reports").parent / "pages/adam.html").read_text()
    assert pd.read_csv(tmp_path / "reports" / "claims.csv").set_index("id")["verdict"]["C11"] == "confirmed"
    assert "A missing 1/N under Adam" in page
