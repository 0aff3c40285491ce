"""Stale findings fail.

The stored table is what today's rules say of the trials that are stored with it, and the quick grid of every experiment at seed 0
does not contradict it, row by row.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pandas as pd
import pytest

from accumulation_harness.analysis import faults, ledger, load, tables
from accumulation_harness.analysis.question import Ruling, registered

ROOT = Path(__file__).parents[1]
FINDINGS = ROOT / "docs" / "findings"
EXACT = (Ruling.confirmed, Ruling.refuted, Ruling.conditional)
AUDITED = "released_trainers"


def kept_archive() -> Path:
    """The newest trials that are kept, whose table lies beside them."""
    return max(FINDINGS.glob("*/trials.tar.xz"))


def stored() -> pd.DataFrame:
    """The table that was decided by the trials that are kept."""
    return pd.read_csv(kept_archive().with_name("claims.csv"), keep_default_na=False).set_index("id")


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
    command = [sys.executable, "-m", "accumulation_harness", "run", f"+experiment={name}", "hydra.sweeper.size=quick", "seed=0",
               f"results={tmp_path}", "tracking.mode=disabled"]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    fresh = ledger.table(load.read(tmp_path))
    assert (fresh["experiment"].str.contains(name) & (fresh["verdict"] != "no data")).any()
    assert contradictions(fresh[fresh["experiment"].str.contains(name)], kept) == []


def test_what_the_quick_grids_found_does_not_contradict_the_full_ones() -> None:
    newest = max(FINDINGS.glob("*-quick/claims.csv"))
    assert contradictions(pd.read_csv(newest, keep_default_na=False), stored()) == []


def test_a_verdict_that_turned_is_found_and_one_left_open_is_not() -> None:
    kept = pd.DataFrame({"id": ["A1", "B4"], "verdict": ["refuted", "conditional"]}).set_index("id")
    fresh = pd.DataFrame({"id": ["A1", "B4"], "verdict": ["refuted", "needs the full grid"], "explanation": "Because."})
    assert contradictions(fresh, kept) == []
    assert contradictions(fresh.assign(verdict="confirmed"), kept) == [
        "A1: stored refuted, now confirmed: Because.",
        "B4: stored conditional, now confirmed: Because.",
    ]


@pytest.fixture(scope="module")
def kept_trials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the trials that are kept, without their step rows, and of the records of audits."""
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(kept_archive()) as file:
        file.extractall(folder, filter="data")
    shutil.copytree(FINDINGS / "audits", folder / "audits")
    return folder


@pytest.fixture(scope="module")
def kept_results(kept_trials: Path) -> load.Results:
    """As `accumulation_harness.analysis.report` reads them."""
    return faults.with_visibility(kept_trials, load.read(kept_trials))


def test_the_table_is_what_the_rules_say_of_the_trials_kept_beside_it(kept_results: load.Results) -> None:
    written = io.BytesIO(tables.to_csv(ledger.table(kept_results)))
    now, kept = (pd.read_csv(source, index_col="id") for source in (written, kept_archive().with_name("claims.csv")))
    known = {*kept_results.experiments}
    decided = [id for id, names in now["experiment"].dropna().items() if {*names.split(", ")} <= known]
    assert decided
    # Another version of a library may round the measured numbers otherwise.
    pd.testing.assert_frame_equal(kept.loc[decided], now.loc[decided], rtol=1e-9, atol=1e-12)


def test_the_faults_are_those_of_the_trials_kept_beside_them(kept_results: load.Results) -> None:
    now = faults.to_table(kept_results.arms)
    known = list(faults.COLUMNS[:-1])  # the loss curves are not kept
    kept = pd.read_csv(kept_archive().with_name("faults.csv"))
    pd.testing.assert_frame_equal(kept[known], now[known].reset_index(drop=True))


def test_the_trials_that_are_kept_are_of_commits_that_the_page_names(kept_trials: Path) -> None:
    said = (FINDINGS / "README.md").read_text()
    for path in kept_trials.glob("*/*/trial.json"):
        environment = json.loads(path.read_bytes())["environment"]
        assert environment["commit"][:7] in said, path
