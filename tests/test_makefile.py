"""`make report` asks every question, the main one first."""

from __future__ import annotations

import subprocess
from pathlib import Path

from omegaconf import OmegaConf

ROOT = Path(__file__).parents[1]


def test_the_groups_of_a_report_are_all_experiments() -> None:
    dry = subprocess.run(["make", "-n", "report"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    groups = dry.partition("for questions in ")[2].partition(";")[0].split()
    everything = OmegaConf.load(ROOT / "conf/experiment/all.yaml")
    assert ",".join(groups).split(",") == list(everything.hydra.sweeper.experiments)
    assert groups[0] == "equivalence" and len(groups) > 1
