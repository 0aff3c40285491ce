"""The record that is committed after a run on other hardware."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness.results.store import Store

ARM = {
    "workload": "digits", "norm": "group", "optimizer": "adam", "precision": "float16", "seed": 0, "effective_batch": 64,
    "accumulation_steps": 4, "micro_batch": 16, "arm": "accumulated", "algebra_error": 3e-16, "rounding_ratio": 0.75,
    "scale": 1.0, "cosine": 1.0, "residual": 1e-3, "counters_ok": True, "trajectory_ratio": 2.0, "verdict": "equivalent",
    "cause": "", "explained": False,
}  # fmt: skip


def test_a_summary_counts_verdicts_and_names_the_device(tmp_path: Path) -> None:
    for seed, verdict in enumerate(["equivalent", "equivalent", "degraded"]):
        arm = {**ARM, "experiment": "gpu", "trial": f"t{seed}", "seed": seed, "verdict": verdict, "rounding_ratio": 0.5 + seed}
        with Store(tmp_path / "results").open_trial("gpu", f"t{seed}", {"seed": seed, "steps": 1}) as writer:
            writer.add({"step": 0, "arm": "full", "loss": 1.0})
            writer.finish({"arms": [arm], "environment": {"device": "Card X", "python": "3.12"}, "seconds": 1.0})
    command = [sys.executable, "-m", "analysis.summary", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["device"], summary["trials"], len(summary["arms"])) == ("Card X", 3, 1)
    assert summary["arms"][0]["verdicts"] == {"equivalent": 2, "degraded": 1}
    assert summary["arms"][0]["largest_rounding_ratio"] == 2.5


def test_nothing_to_summarise_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "analysis.summary", "--results", str(tmp_path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1 and "no finished trial" in done.stderr and not (tmp_path / "out").exists()
