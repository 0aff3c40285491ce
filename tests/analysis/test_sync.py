"""Offline runs of real trials reach a server with one command, once, and with them a run of the sweep."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accumulation_harness.analysis import load, sync
from accumulation_harness.results.judged_arm import VERDICT_COLUMNS
from tests.results.wandb_stand_in import API_KEY, stand_in


def test_nothing_to_upload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sync.main(["--results", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == (
        f"--results={tmp_path}/none: expected a folder with offline runs of W&B, as `accumulation-harness run "
        f"results={tmp_path}/none` makes one\n"
    )


def test_the_table_and_the_figures_of_a_sweep(mirrored: Path, tmp_path: Path) -> None:
    arms = load.from_store(mirrored)
    table = sync.table(arms)
    assert set(table) == set(VERDICT_COLUMNS) and len(table) == len(arms)
    assert list(table)[:2] == ["workload", "norm"], "what one groups by comes first"
    made = dict(sync.pictures(mirrored, "single", arms))
    assert list(made) == ["algebra", "gradient-error", "loss-float32", "distance"]
    path = sync.to_png(made["algebra"], tmp_path / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_runs_are_uploaded_once(mirrored: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(mirrored, results)
    num = len(list(results.rglob("*.wandb")))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB") and "proxy" not in name.lower()}
    command = [sys.executable, "-m", "accumulation_harness", "sync", "--results", str(results), "--project", "mine"]
    with stand_in() as server:
        environment = {**clean, "HOME": str(tmp_path), "WANDB_BASE_URL": server.url, "WANDB_API_KEY": API_KEY}

        def run() -> list[str]:
            done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return [line for line in done.stdout.splitlines() if "uploaded" in line or "sweep" in line]

        table = "“single”: a run of the sweep, with a table of 10 verdicts and 4 figures."
        assert run() == [table, f"{num + 1} runs uploaded, 0 were there already."]
        sent = [variables for name, variables in server.operations if name == "UpsertBucket" and variables.get("jobType")]
        assert [made["jobType"] for made in sent].count("trial") == num == 2 and {made["project"] for made in sent} == {"mine"}
        [shown] = [row["verdicts"] for row in server.history if "verdicts" in row]
        assert (shown["nrows"], shown["ncols"]) == (10, len(VERDICT_COLUMNS))
        assert run() == [f"0 runs uploaded, {num + 1} were there already."]
        shutil.rmtree(next(results.glob("single/*batch*")))  # other verdicts: another run of the sweep
        assert run() == [table.replace("10", "5"), f"1 runs uploaded, {num} were there already."]
        assert sync.SWEEP in [variables.get("jobType") for name, variables in server.operations if name == "UpsertBucket"]
