"""The record that is committed after a run on other hardware."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.stored_trials import MakeTrial


def test_a_summary_counts_verdicts_and_names_the_device(results: Path, tmp_path: Path, make_trial: MakeTrial) -> None:
    for seed, verdict in enumerate(["equivalent", "equivalent", "degraded"]):
        change = {("accumulated", n): {"verdict": verdict, "ratio": 0.5 + seed} for n in (2, 4)}
        make_trial(experiment="gpu", seed=seed, device="Card X", change=change)
    command = [
        sys.executable,
        "-m",
        "accumulation_harness.analysis.summary",
        "--results",
        str(results),
        "--out",
        str(tmp_path / "out"),
    ]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["device"], summary["trials"]) == ("Card X", 3)
    accumulated, permuted = summary["arms"]
    assert accumulated["verdicts"] == {"equivalent": 4, "degraded": 2} and permuted["verdicts"] == {"equivalent": 3}
    assert (accumulated["arm"], accumulated["largest_rounding_ratio"]) == ("accumulated", 2.5)


def test_nothing_to_summarise_is_an_error(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "accumulation_harness.analysis.summary",
        "--results",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1 and "no finished trial" in done.stderr and not (tmp_path / "out").exists()
