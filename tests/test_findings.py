"""Stale findings fail: the quick grid of every experiment at seed 0 does not contradict the stored verdicts, row by row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from analysis import ledger, load
from analysis.question import Ruling, registered

ROOT = Path(__file__).parents[1]
EXACT = (Ruling.confirmed, Ruling.refuted, Ruling.conditional)
AUDITED = "released_trainers"


def stored() -> pd.DataFrame:
    """The newest stored `claims.csv` that has this ledger's columns."""
    found = [pd.read_csv(path, keep_default_na=False) for path in sorted((ROOT / "docs" / "findings").glob("*/claims.csv"))]
    with_rules = [table for table in found if set(ledger.COLUMNS) <= set(table)]
    if not with_rules:
        pytest.skip("docs/findings holds no claims.csv with this ledger's columns yet")
    return with_rules[-1].set_index("id")


def contradictions(fresh: pd.DataFrame, kept: pd.DataFrame) -> list[str]:
    """The claims that both decide, and otherwise: a grid of one seed may leave open what several decide, and nothing else."""
    both = fresh.set_index("id").join(kept["verdict"].rename("stored"), how="inner")
    decided = both[both["verdict"].isin(EXACT) & both["stored"].isin(EXACT)]
    apart = decided[decided["verdict"] != decided["stored"]]
    return [f"{row.Index}: stored {row.stored}, now {row.verdict}: {row.explanation}" for row in apart.itertuples()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in registered().items() if one.claims and name != AUDITED])
def test_one_seed_does_not_contradict_what_is_stored(name: str, tmp_path: Path) -> None:
    kept = stored()
    command = [sys.executable, "-m", "harness", f"+experiment={name}", "hydra.sweeper.size=quick", "seed=0",
               f"results={tmp_path}", "tracking.mode=disabled"]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    fresh = ledger.table(load.read(tmp_path))
    assert (fresh["experiment"].str.contains(name) & (fresh["verdict"] != "no data")).any()
    assert contradictions(fresh[fresh["experiment"].str.contains(name)], kept) == []


def test_a_verdict_that_turned_is_found_and_one_left_open_is_not() -> None:
    kept = pd.DataFrame({"id": ["A1", "B4"], "verdict": ["refuted", "conditional"]}).set_index("id")
    fresh = pd.DataFrame({"id": ["A1", "B4"], "verdict": ["refuted", "needs the full grid"], "explanation": "Because."})
    assert contradictions(fresh, kept) == []
    assert contradictions(fresh.assign(verdict="confirmed"), kept) == [
        "A1: stored refuted, now confirmed: Because.",
        "B4: stored conditional, now confirmed: Because.",
    ]
