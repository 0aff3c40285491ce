"""The pages on convergence and on the balance loss: from rows made by hand, and from a tiny run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis import ledger, report
from analysis.content import Table
from analysis.question import Material
from experiments import balance_loss, convergence
from harness.config import DataConfig, HarnessConfig, LastWindow, OptimizerConfig, Study, TrackingConfig, TrackingMode
from harness.sweep.experiment import run_one
from tests.analysis.test_convergence import rows
from tests.experiments.optimizer_rows import results


def verdicts(frame: pd.DataFrame) -> dict[str, str]:
    """The verdict column of the endings, by arm."""
    columns = {name: 0.0 for name in ("rate", "gap", "test_accuracy")}
    found = results(frame.assign(study="learning_curves", **columns).to_dict("records"))  # type: ignore[arg-type]
    material = Material(experiment=convergence.EXPERIMENT, results=found, steps=frame, read_steps=lambda _: frame, l4=frame)
    section = convergence.endings(material)
    assert section is not None
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    arm, verdict = table.head.index("arm"), table.head.index("verdict")
    return {row[arm]: row[verdict] for row in table.rows if row[verdict] != "-"}


def test_an_effect_is_judged_at_tuned_rates_inside_the_grid_and_with_enough_seeds() -> None:
    small = "small batch, N = 4"
    assert verdicts(rows(0.05))[small] == "worse" and verdicts(rows(-0.05))[small] == "better"
    assert set(verdicts(rows(0.0)).values()) == {"same"}
    assert set(verdicts(rows(0.05, best=0.4)).values()) == {"undecided"}
    assert set(verdicts(rows(0.05, seeds=4)).values()) == {"undecided"}


def test_the_finding_on_the_balance_loss_follows_the_numbers() -> None:
    frame = pd.DataFrame([
        {"arm": arm, "accumulation_steps": num, "gradient_error": error, "identity_error": 1e-16}
        for num in (2, 8)
        for arm, error in (("per_micro_batch", 0.02), ("buffered_counts", 0.1), ("two_passes", 1e-16))
    ])  # fmt: skip

    def said(**changes: float) -> str:
        own = frame.copy()
        for arm, error in changes.items():
            own.loc[own["arm"] == arm, "gradient_error"] = error
        return balance_loss.finding(own)

    assert "micro-batch: yes" in said() and "exact: yes" in said() and "seeds: at no N" in said()
    assert "micro-batch: no" in said(per_micro_batch=1e-5) and "exact: no" in said(two_passes=1e-9)
    assert "seeds: at every N" in said(buffered_counts=0.01)


def test_without_claims_nothing_is_said_to_have_held() -> None:
    for experiment in (convergence.EXPERIMENT, balance_loss.EXPERIMENT):
        assert ledger.answer(experiment, results([{"trial": "a"}])).holds is None


@pytest.mark.slow
def test_pages_of_tiny_runs(tmp_path: Path) -> None:
    usual = HarnessConfig(
        results=str(tmp_path / "results"), tracking=TrackingConfig(mode=TrackingMode.disabled), effective_batch=32,
        accumulation_steps=(4,), steps=10,
    )  # fmt: skip
    for seed in (0, 1, 100):
        for lr in (0.05, 0.1, 0.2):
            name = {
                "experiment": "convergence",
                "study": Study.learning_curves,
                "optimizer": OptimizerConfig(lr=lr),
                "seed": seed,
            }
            run_one(HarnessConfig(**{**vars(usual), **name}))  # type: ignore[arg-type]
    balance = {"experiment": "balance_loss", "study": Study.balance_loss, "data": DataConfig(last_window=LastWindow.drop)}
    run_one(HarnessConfig(**{**vars(usual), **balance}))  # type: ignore[arg-type]
    assert report.main(["--results", usual.results, "--out", str(tmp_path / "out")]) == 0
    figures = sorted(path.name for path in (tmp_path / "out" / "figures").iterdir())
    assert any(name.startswith("convergence-curves-digits") for name in figures) and "balance_loss-router-gradient.svg" in figures
