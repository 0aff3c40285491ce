"""The rules of the experiment on momentum, on hand-built results and on a real tiny run."""

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
from accumulation_harness.experiments.momentum import answers as momentum
from accumulation_harness.sweep.experiment import run_one
from tests.experiments.optimizer_rows import memory_rows, results, state_rows


def everything(**changes: Any) -> list[dict[str, Any]]:
    return [*state_rows(**changes), *state_rows(norm="batch"), *state_rows(dropout=0.2), *state_rows("sgd"), *memory_rows()]


def verdicts(measurements: list[dict[str, Any]]) -> dict[str, Ruling]:
    return {name: one.verdict for name, one in ledger.findings(momentum.EXPERIMENT, results(measurements)).items()}


EXPECTED = {claim.id: claim.expects for claim in momentum.CLAIMS}
OPEN = Ruling.needs_full_grid


def test_what_theory_expects() -> None:
    assert verdicts(everything()) == EXPECTED
    said = ledger.answer(momentum.EXPERIMENT, results(everything())).sentences
    assert "4 of 4 claims fell as theory expects." in said
    about = "C2, “The gradients of a window's micro-batches are coupled in time”: conditional ("
    assert any(sentence.startswith(about) for sentence in said), "an id alone says nothing to a reader of the page"


@pytest.mark.parametrize(
    ("change", "fell"),
    [
        ({("accumulated", "state_error"): 2e-12}, {"C3": Ruling.confirmed}),
        ({("accumulated", "parameter_error"): math.nan}, {"C3": Ruling.confirmed}),
        ({("reordered", "state_error"): 2e-12}, {"C1": Ruling.confirmed, "C2": Ruling.confirmed}),
        ({("reordered", "gradient_error"): 2e-12}, {"C2": Ruling.confirmed}),
        # what has to differ does not: the comparison was blind
        ({("small_steps", "state_error"): 1e-4}, {"C3": OPEN}),
        ({("optimizer_state_per_micro_batch", "state_error"): 1e-14}, {"C3": OPEN}),
        ({("small_steps_reordered", "state_error"): 1e-14}, {"C1": OPEN, "C2": OPEN}),
        ({("small_steps_memory", "parameter_error"): 0.25}, {"C10": Ruling.conditional}),
        ({("small_steps_memory", "parameter_error"): 0.5}, {"C10": Ruling.refuted}),
    ],
)
def test_what_would_change_a_verdict(change: dict[tuple[str, str], float], fell: dict[str, Ruling]) -> None:
    assert verdicts(everything(change=change)) == EXPECTED | fell


def test_momentum_that_mixes_older_micro_batches_confirms_c1() -> None:
    rows = [row for row in everything() if row["study"] != "optimizer_memory"]
    assert verdicts([*rows, *memory_rows(stale=0.99)])["C1"] == Ruling.confirmed
    costly = [row | {"loss": 0.51} if row.get("arm") == "reordered" else row for row in everything()]
    assert verdicts(costly)["C1"] == Ruling.refuted, "2 % of the loss is more than the bound"
    assert verdicts([*rows, *memory_rows(beta=0.91)])["C10"] == Ruling.conditional  # not the half-life of the optimizer's beta
    assert {name: verdicts(rows)[name] for name in ("C1", "C10")} == {"C1": OPEN, "C10": OPEN}


def test_too_few_results_decide_nothing() -> None:
    assert verdicts(memory_rows()) == dict.fromkeys(EXPECTED, OPEN)
    short = [row for row in everything() if row.get("after_steps", 0) < 200]
    assert verdicts(short) == EXPECTED | {"C3": OPEN}
    plain = [row for row in everything() if row.get("norm", "none") == "none"]
    assert verdicts(plain) == EXPECTED | {"C2": OPEN}
    assert verdicts([*plain, *state_rows(norm="batch", change={("reordered", "buffer_error"): 1e-15})])["C2"] == Ruling.refuted


def test_a_real_tiny_run_reaches_the_page(tmp_path: Path) -> None:
    """One trial of each study."""
    store = tmp_path / "results"
    for study, name, batch, num, steps in (
        ("optimizer_states", OptimizerName.momentum, 64, 4, 50),
        ("optimizer_memory", OptimizerName.adam, 64, 4, 3),
        ("batch_sizes", OptimizerName.momentum, 60, 12, 4),
    ):
        run_one(
            HarnessConfig(
                experiment="momentum",
                study=study,
                workload=WorkloadConfig(data=Data.digits, model=Model.mlp, width=2),
                optimizer=OptimizerConfig(name=name, lr=0.02),
                precision=Precision.float64,
                effective_batch=batch,
                accumulation_steps=(num,),
                steps=steps,
                results=str(store),
                tracking=TrackingConfig(mode=TrackingMode.disabled),
            )
        )
    page = (report.write(store, tmp_path / "reports").parent / "pages/momentum.html").read_text()
    claims = pd.read_csv(tmp_path / "reports" / "claims.csv").set_index("id")["verdict"]
    assert claims[["C1", "C10"]].to_list() == ["conditional", "confirmed"]
    for title in ("What the state remembers", "The order inside a window", "N small steps against one window"):
        assert title in page
