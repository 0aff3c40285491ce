"""`make report` asks every question, the main one first: with one seed, so that a page is there soon."""

from __future__ import annotations

import subprocess
from pathlib import Path

from omegaconf import OmegaConf

ROOT = Path(__file__).parents[1]


def test_the_groups_of_a_report_are_all_experiments() -> None:
    dry = subprocess.run(["make", "-n", "report"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    first, *groups = dry.partition("for group in ")[2].partition(";")[0].split()
    everything = OmegaConf.load(ROOT / "conf/experiment/all.yaml")
    assert ",".join(groups).split(",") == list(everything.hydra.sweeper.experiments)
    assert (first, groups[0]) == ("equivalence@seed=0", "equivalence") and len(groups) > 1


def test_what_a_group_is_narrowed_to_is_handed_on(tmp_path: Path) -> None:
    """The commands that the shell runs, with an interpreter that only says how it was called."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (tmp_path / ".ready").touch()
    (binaries / "python").write_text('#!/bin/sh\necho "$@" >> "$0.log"\n')
    (binaries / "python").chmod(0o755)
    subprocess.run(
        ["make", "report", f"VENV={tmp_path}", f"--old-file={tmp_path}/.ready"], cwd=ROOT, capture_output=True, check=True
    )
    sweeps = [
        line for line in (binaries / "python.log").read_text().splitlines() if line.startswith("-m accumulation_harness run ")
    ]
    shared = "device=cpu hydra.sweeper.size=quick results=results"
    assert sweeps[0] == f"-m accumulation_harness run +experiment=all hydra.sweeper.experiments=[equivalence] seed=0 {shared}"
    assert sweeps[1] == f"-m accumulation_harness run +experiment=all hydra.sweeper.experiments=[equivalence] {shared}"
